"""Users' own tests on ranks: ``item.py`` decides and sends a test's body, ``job.py`` runs it in each rank."""
