"""A CNN on handwritten digits: `elasticdl run --num_workers 1-4 -- python examples/elastic/torch/cnn.py`."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--global_batch_size", type=int, default=256)
parser.add_argument("--max_gpu_batch_size", type=int, default=64, help="most samples that fit a GPU's memory")
options = parser.parse_args()

elastic.init(options.global_batch_size, options.max_gpu_batch_size)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
loader = elastic.DataLoader(torch.utils.data.TensorDataset(images, torch.tensor(digits.target)))
convolutions = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 4 * 4, 10)).to(elastic.device())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


@elastic.run
def train(state):
    for epoch in loader.epochs(options.epochs):
        for batch in loader:
            optimizer.zero_grad()
            for inputs, labels in batch:  # as many micro-batches as this worker's part of the global batch needs
                batch.backward(cross_entropy(model(inputs), labels))
            optimizer.step()
            state.commit()
        if elastic.rank() == 0:
            print(f"epoch {epoch}: {elastic.size()} workers, step {state.step}, loss {state.loss:.4f}", flush=True)


train(state)
