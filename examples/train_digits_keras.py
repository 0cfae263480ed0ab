"""Elastic training of your own loop: `elasticdl run --num_workers 2-4 -- python examples/train_digits_keras.py`."""

import keras
from sklearn.datasets import load_digits

import elasticdl.elastic.keras as elastic
from elasticdl.data import Arrays

elastic.init(global_batch_size=256, max_gpu_batch_size=64)
digits = load_digits()
images = digits.images.astype("float32").reshape(-1, 64) / 16
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
loader = elastic.DataLoader(Arrays(images, digits.target))
state = elastic.KerasState(model=model, optimizer=optimizer, loss=loss, loader=loader)


@elastic.run
def train(state):
    for epoch in state.loader.epochs(20):
        for batch in state.loader:  # one global batch
            state.make_step(batch)  # this worker's micro-batches, then the mean gradient of all workers
            state.commit()
        if elastic.rank() == 0:
            print(f"epoch {epoch}: {elastic.size()} workers, step {state.step}, loss {state.loss:.4f}")


train(state)
