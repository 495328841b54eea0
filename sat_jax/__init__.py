"""Arrays in, arrays out: the policy and the objective. No files (but `model/hf.py`), clocks, logging or gRPC."""
