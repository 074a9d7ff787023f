"""Before the first import of Triton: without a GPU its kernels run in the interpreter, on a GPU they are compiled."""

import os

import torch

if torch.cuda.is_available():
    assert "TRITON_INTERPRET" not in os.environ, "unset TRITON_INTERPRET: on a GPU the tests run the compiled kernels"
else:
    os.environ["TRITON_INTERPRET"] = "1"

# The tests' tensors are small: a second thread gains nothing, and a busy machine makes it wait.
torch.set_num_threads(1)
