"""The proof that a pass kept what the step computes: every output stands for the expression that it stood for before."""
