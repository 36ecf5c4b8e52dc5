"""An exported Doge, compiled ahead of time, runs in a C++ process without Python."""

import os
import shutil
import subprocess

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from torch.utils import cpp_extension  # noqa: E402

from flash_dmattn.integrations.transformers import enable_flash_dmattn  # noqa: E402
from scored_models import make_base  # noqa: E402

compiler = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.transformers,
    pytest.mark.skipif(compiler is None, reason="no C++ compiler"),
    # Its compilers take as long as a tenth of the other tests of models. test_compiled_doge.py runs the exported program
    # in a process without this package's Python.
    pytest.mark.skipif(
        "FLASH_DMATTN_TEST_RELEASE" not in os.environ, reason="a part of make release-check"
    ),
]

# For one model, precompiling the header takes longer than it saves.
QUICK_TO_COMPILE = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.simdlen": 1,  # without vectors
}
LENGTHS = (9, 20, 33)

PROGRAM = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>

// Arguments: the operators' library, the model's package, lengths. Prints the last row of the logits for the tokens
// 0, 1, 2, ...
int main(int count, char** arguments) {
  if (dlopen(arguments[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\\n", dlerror());
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader model(arguments[2]);
  for (int i = 3; i < count; ++i) {
    const at::Tensor ids = at::arange(std::atoi(arguments[i]), at::kLong).unsqueeze(0);
    const at::Tensor logits = model.run({ids})[0].select(1, -1).flatten().contiguous();
    for (std::int64_t n = 0; n < logits.numel(); ++n) std::printf("%.9g ", logits.data_ptr<float>()[n]);
    std::printf("\\n");
  }
}
"""


def compile_program(folder):
    source, program = folder / "run.cpp", folder / "run"
    source.write_text(PROGRAM)
    paths = cpp_extension.library_paths()
    subprocess.run(
        [compiler, "-std=c++20", "-O0", str(source), "-o", str(program)]
        + [f"-I{path}" for path in cpp_extension.include_paths()]
        + [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        + [f for path in paths for f in (f"-L{path}", f"-Wl,-rpath,{path}")]
        + ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-ltorch", "-ldl"],
        check=True,
    )
    return program


def test_logits_equal_python(tmp_path):
    model = enable_flash_dmattn(make_base("Doge", num_hidden_layers=1))

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    length = torch.export.Dim("length", min=6, max=64)
    with torch.no_grad():
        example = torch.arange(20)[None]
        exported = torch.export.export(Logits(), (example,), dynamic_shapes=({1: length},))
        package = str(tmp_path / "doge.pt2")
        torch._inductor.aoti_compile_and_package(
            exported, package_path=package, inductor_configs=QUICK_TO_COMPILE
        )
        expected = [model(torch.arange(n)[None], use_cache=False).logits[0, -1] for n in LENGTHS]
    library = next(p for p in torch.ops.loaded_libraries if p.endswith("_C.so"))
    lines = subprocess.run(
        [str(compile_program(tmp_path)), library, package, *map(str, LENGTHS)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for line, logits in zip(lines, expected, strict=True):
        program_logits = torch.tensor([float(x) for x in line.split()])
        torch.testing.assert_close(program_logits, logits, rtol=1e-4, atol=1e-5)
