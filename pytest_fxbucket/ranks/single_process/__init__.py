"""Back ends ``local`` and ``fake``: one process plays all ranks, one at a time."""
