"""The generation of transformers that tests run with."""

import transformers

IS_TRANSFORMERS_4 = int(transformers.__version__.split(".")[0]) < 5
