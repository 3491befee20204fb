"""Random steps, plans and options against a pass: drawn, judged, cut short, printed as a test, and kept."""
