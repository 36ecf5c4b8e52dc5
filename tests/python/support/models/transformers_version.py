"""The major version of transformers that the tests run with."""

import transformers

IS_TRANSFORMERS_4 = int(transformers.__version__.split(".")[0]) < 5
