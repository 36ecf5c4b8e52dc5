"""The backends that accept CPU tensors in a test, among them interpreted Triton."""

import os

CPU_BACKENDS = ["", "reference", *["triton"] * (os.environ.get("TRITON_INTERPRET") == "1")]
