"""Elastic training of your own loop: `elasticdl run --num_workers 2-4 -- python examples/train_digits.py`."""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import elasticdl.elastic.torch as elastic

elastic.init(global_batch_size=256, max_gpu_batch_size=64)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
dataset = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(elastic.device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
state = elastic.TorchState(model=model, optimizer=optimizer, loader=elastic.DataLoader(dataset))


@elastic.run
def train(state):
    for epoch in state.loader.epochs(20):
        for batch in state.loader:  # one global batch
            for inputs, labels in batch:  # this worker's micro-batches
                batch.backward(cross_entropy(model(inputs), labels))
            optimizer.step()  # on the mean gradient over the global batch
            state.commit()
        if elastic.rank() == 0:
            print(f"epoch {epoch}: {elastic.size()} workers, step {state.step}, loss {state.loss:.4f}")


train(state)
