"""PyTorch's compiler stays out of a process that does not compile, and is whole in one that does."""

import subprocess
import sys

BEGIN = """
import sys
import torch
import elasticdl.elastic.torch
import elasticdl.ga.torch.optim

model = torch.nn.Linear(3, 3)
optimizer = elasticdl.ga.torch.optim.Optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 1)

def step():
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
optimizer.load_state_dict(optimizer.state_dict())

@torch.compiler.disable
def eager():
    return not torch.compiler.is_compiling()
"""


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_does_not_import_it_and_compiling_leaves_alone_what_it_is_to_leave_alone():
    program = """
import inspect
inspect.getmodule(inspect.currentframe())  # asks every module for its file
assert eager()
print("sympy" in sys.modules, sorted(name for name in sys.modules if name.startswith("torch._dynamo.")))

seen, graphs = [], []

def function(x):
    y = x.sin() * 2
    seen.append((eager(), torch.compiler.is_compiling()))
    return y + 1

def backend(graph, inputs):
    graphs.append(graph)
    return graph

torch.testing.assert_close(torch.compile(function, backend=backend)(torch.ones(2)), torch.ones(2).sin() * 2 + 1)
before = model.weight.detach().clone()
model(torch.ones(2, 3)).sum().backward()
torch.compile(optimizer.step, backend=backend)()
print(all(eager for eager, _ in seen), len(graphs) > 0, bool((model.weight != before).any()))
"""
    assert run(program) == "False []\nTrue True True\n"


def test_its_settings_are_those_that_it_reads():
    program = """
import torch._dynamo.config as config
from torch._dynamo import convert_frame
assert config is torch._dynamo.config is sys.modules["torch._dynamo.config"] is convert_frame.config
assert config.__spec__.origin.endswith("config.py")
assert torch._dynamo is sys.modules["torch._dynamo"]
print(not any("late_dynamo" in type(finder).__module__ for finder in sys.meta_path))
"""
    assert run(program) == "True\n"


def test_threads_that_want_it_at_once_get_one_and_what_is_written_is_written_there():
    program = """
from concurrent.futures import ThreadPoolExecutor
stand_in = torch._dynamo
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda _: stand_in.config, range(4)))
print(all(each is torch._dynamo.config for each in found))
stand_in.disable = torch._dynamo.mine = "mine"
print(torch._dynamo.disable, stand_in.mine, "optimize" in dir(stand_in))
"""
    assert run(program) == "True\nmine mine True\n"
