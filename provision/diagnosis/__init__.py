"""Known errors: their entries as data (`signatures.py`), what the doctor finds (`findings.py`), and how logs are read (`logs/`)."""
