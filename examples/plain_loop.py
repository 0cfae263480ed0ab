"""A plain PyTorch loop, elastic by one line: `elasticdl run --num_workers 2-4 -- python examples/plain_loop.py`."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import elasticdl.elastic.torch as elastic

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
train_set, test_set = random_split(TensorDataset(images, torch.tensor(digits.target)), [1500, 297])
train_loader = DataLoader(train_set, batch_size=100, shuffle=True)
test_images, test_labels = test_set[:]

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)

model, optimizer, train_loader = elastic.prepare(model, optimizer, train_loader)

for epoch in range(10):
    for inputs, labels in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    scheduler.step()
    mean = elastic.mean(loss)
    if elastic.rank() == 0:
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
        print(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {accuracy:.3f}")
