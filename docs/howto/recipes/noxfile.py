import nox


@nox.session
@nox.parametrize("torch", ["2.12.1", "2.13.0"])
def plans(session, torch):
    session.install(f"torch=={torch}", "pytest-fxbucket", "-e", ".")
    session.run("python", "-m", "pytest", "--fxbucket-plans=plans", *session.posargs)
