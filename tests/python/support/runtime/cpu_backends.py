"""The backends that compute tensors of the CPU in a test: Triton's, where it is interpreted."""

import os

CPU_BACKENDS = ["", "reference", *["triton"] * (os.environ.get("TRITON_INTERPRET") == "1")]
