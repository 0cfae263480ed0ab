"""A script whose data are loaded by processes, each of which imports the script anew."""

from running_job import start

SCRIPT = """
import torch
import elasticdl.elastic.torch as elastic

elastic.init(8, 4)  # as the processes that load data do, too


def main():
    data = torch.utils.data.TensorDataset(torch.ones(16, 2))
    sampler = elastic.Sampler(16)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=1, multiprocessing_context="spawn")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler)

    @elastic.run
    def train(state):
        for _ in sampler.epochs(1):
            for batch in sampler.steps(loader):
                for (inputs,) in batch:
                    batch.backward(model(inputs).mean())
                optimizer.step()
                state.commit()

    train(state)


if __name__ == "__main__":
    main()
"""


def test_processes_that_are_spawned_open_no_session(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with start(tmp_path, "run", "--num_workers", "1", "--collective", "torch", "--", "python", str(script)) as job:
        assert job.finish() == 0, job.describe()
        assert "succeeded: 2 steps" in job.output
        assert len(job.entries("worker_ready")) == 1
