"""A job on a cluster: the file of its objects, its submission, and how it is deleted."""

import json
import subprocess
import sys

import yaml

from elasticdl.cli import namespace_job
from elasticdl.cli.__main__ import main
from elasticdl.job.spec import JobSpec
from elasticdl.kube.kubeconfig import ClusterTarget


def test_manifests_are_written_for_others_to_apply_and_only_for_the_owner_to_read(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    file.write_text("old")
    file.chmod(0o644)
    argv = ["train", "--image", "i", "--model_def", "m", "--job_name", "digits", "--namespace", "lab"]
    assert main([*argv, "--yaml", str(file)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"job digits written to {file}, with its secret keys: ")
    assert "apply this file only: each --yaml makes other keys" in told
    assert file.stat().st_mode & 0o777 == 0o600
    made = list(yaml.safe_load_all(file.read_text()))
    assert (made[-1]["kind"], made[-1]["spec"]["parallelism"]) == ("Job", 1)
    assert {each["metadata"]["namespace"] for each in made} == {"lab"}
    assert [each["immutable"] for each in made if each["kind"] == "Secret"] == [True] * 4
    (spec,) = [each for each in made if each["metadata"]["name"] == "digits-spec"]
    assert JobSpec.from_json(spec["data"]["job.json"]).model_def == "m"
    assert json.loads(spec["data"]["worker.json"])["spec"]["containers"][0]["image"] == "i"


class Resubmitted:
    """A cluster on which the job is submitted anew as soon as its name is free."""

    namespace = "lab"

    def __init__(self):
        self.there = self._objects("old")

    def _objects(self, uid):
        owned = {"ownerReferences": [{"kind": "Job", "name": "digits-master", "uid": uid}]}
        secret = {"name": f"secret-{uid}", "uid": f"of-{uid}", **owned}
        return {"Job": [{"metadata": {"name": "digits-master", "uid": uid}}], "Secret": [{"metadata": secret}]}

    def list(self, kind, **selection):
        return self.there.get(kind, [])

    def delete(self, kind, name):
        there = [each for each in self.there[kind] if each["metadata"]["name"] != name]
        self.there = {**self.there, kind: there}
        if kind == "Job":
            later = self._objects("new")
            self.there = {each: [*self.there[each], *later[each]] for each in later}


def test_a_job_that_is_submitted_while_its_namesake_is_deleted_stays(monkeypatch):
    cluster = Resubmitted()
    monkeypatch.setattr(namespace_job, "connect", lambda place: cluster)
    monkeypatch.setattr(namespace_job, "POLL", 0.0)
    assert namespace_job.delete("digits", ClusterTarget()) == "job digits deleted"
    assert cluster.there == cluster._objects("new")


def test_without_the_package_it_is_said_how_to_get_it():
    code = (
        "import sys; sys.modules['kubernetes'] = None; from elasticdl.cli.__main__ import main; "
        "sys.exit(main(['status', 'x', '--namespace', 'y']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "elasticdl status: jobs on a cluster need the package kubernetes: pip install '.[kubernetes]' in a checkout of elasticdl, "
    assert (done.returncode, done.stderr) == (2, f"{said}or its wheel with [kubernetes] (docs/install.md)\n")
