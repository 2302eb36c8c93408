"""Health of GPUs before a job: collected on the hosts (`hostside/gpu_health.py`), parsed here, judged by the doctor's checks.

`collect` asks the hosts, `parsers` turns what their tools print into `model`, `checks/health.py` compares that with the catalogue, and
`verdict` sums the findings up as one word per host.
"""
