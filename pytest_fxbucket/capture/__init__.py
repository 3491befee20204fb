"""From a model and a plan to a traced step: frozen graphs with a role for each input and output."""
