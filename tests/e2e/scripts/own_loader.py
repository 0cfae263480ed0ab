"""A loop of one's own over torch's DataLoader; rank 0 writes step, loss and learning rate of each step."""

import os
import sys
import time
from multiprocessing import set_forkserver_preload

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic

elastic.init(global_batch_size=250, max_gpu_batch_size=100)  # as the processes that load data do, too

if __name__ == "__main__":
    set_forkserver_preload(["torch"])  # so that not each of the loader's processes has to import it
    pixels = torch.randn(1500, 64, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(pixels, pixels[:, :10].argmax(1))
    sampler = elastic.Sampler(dataset)
    processes = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "forkserver"}
    loader = DataLoader(dataset, batch_sampler=sampler, **processes)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rate = elastic.LearningRate(lambda epoch: 0.1 / (1 + epoch))
    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, learning_rate=rate)

    @elastic.run
    def train(state):
        for _ in sampler.epochs(int(sys.argv[2])):
            for batch in sampler.steps(loader):
                for inputs, labels in batch:
                    batch.backward(cross_entropy(model(inputs), labels))
                optimizer.step()
                if elastic.rank() == 0:
                    with open(sys.argv[1], "a") as curve:
                        curve.write(f"{state.step} {state.loss} {state.learning_rate}\n")
                if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
                    time.sleep(min(2.0, 0.05 * 1.05**state.step))  # what a test waits for comes before the last step
                state.commit()

    train(state)
