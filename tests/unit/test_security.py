"""What docs/security.md says. A mark behind each sentence names its test: here, or where the thing is tested anyway."""

import asyncio
import re
import stat
from pathlib import Path

import pytest
from test_common_manifests import parts
from test_master_serve import NoPlace

from elasticdl.cli import folder_run
from elasticdl.common.credentials import LOOPBACK, Role, Token, WorkerEnvironment
from elasticdl.job.jobdir import JobDir, MasterAddress, create_job_dir
from elasticdl.job.spec import JobSpec
from elasticdl.kube import manifests, names
from elasticdl.master.core.events import StopRequested
from elasticdl.master.shell.calls import ALLOWED, TokenAccess
from elasticdl.master.shell.serve import Master, local_master

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def made(kind, **options):
    return [each for each in manifests.companions(parts(**options)) if each["kind"] == kind]


# ---- the document ----


def test_every_sentence_of_the_document_has_its_test():
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)}
    body = "\n".join(line for line in DOCUMENT.splitlines() if not line.startswith(("#", "|")))  # headings and tables
    *marked, rest = re.split(r"<!-- (.*?) -->", body)
    assert not rest.strip(), "without a mark"
    for sentence, mark in zip(marked[::2], marked[1::2], strict=True):
        assert re.fullmatch(r"(?s)(?:(?![.!?] \S).)*[.!?]", sentence.strip()), f"not one sentence: {sentence}"
        if mark not in ("advice", "warning"):
            assert mark.removeprefix("test: ") in tests, f"no such test: {mark}, of: {sentence}"


def test_the_table_of_roles_is_what_the_master_allows():
    rows = re.findall(r"^\| (\w+) \| `(.*?)` \| (.*?) \|$", DOCUMENT, re.MULTILINE)
    calls = {role: ", ".join(sorted(name for name, roles in ALLOWED.items() if role in roles)) for role in Role}
    assert set(rows) == {(role, names.tls_name("NAME", role), calls[role] or "none") for role in Role}


# ---- Slurm ----


def test_only_the_user_can_read_the_keys_of_a_slurm_job(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path))
    monkeypatch.setattr(folder_run, "submit", lambda job, spec: "7")
    spec = JobSpec(job_name="mine", launcher="slurm", command=("true",))
    assert folder_run.run_on_slurm(spec, detach=True) == 0
    folder = JobDir(tmp_path / "jobs" / "mine").tls
    assert {each.name for each in folder.iterdir()} == {str(role) for role in Role}
    modes = {(each.is_dir(), mode(each)) for each in [folder.parent, *folder.rglob("*")]}
    assert modes == {(True, 0o700), (False, 0o600)}


# ---- this machine ----


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path))
    return create_job_dir("mine")


def serve_here(job, look):
    """A master whose job is stopped as soon as it runs; ``look`` is called then."""
    spec = JobSpec(num_workers="1", command=("true",))

    async def serve():
        def stop():
            look()
            master.post(StopRequested("enough"))

        master = local_master(spec, job, lambda address: lambda report, limits: NoPlace(report, finding=stop))
        await master.run()

    asyncio.run(serve())


def test_only_the_user_can_read_a_local_jobs_token_and_it_goes_with_the_job(job):
    assert mode(job.path) == 0o700
    job.path.chmod(0o755)  # as somebody does who lets a colleague look at the logs
    found = []
    for _ in range(2):
        serve_here(job, lambda: found.append((MasterAddress.read(job.master), mode(job.master))))
        assert not job.master.exists()
        job.status.unlink()
    (first, rights), (second, _) = found
    assert first.token != second.token
    assert (rights, first.address.startswith(LOOPBACK)) == (0o600, True)
    assert "secret" in WorkerEnvironment("127.0.0.1:1", Token("secret"), 0, "job.json").to_env().values()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:50001"])
def test_a_token_is_never_sent_over_a_network(address):
    with pytest.raises(ValueError, match="a token must not travel in the clear"):
        TokenAccess(Token("secret")).add_port(None, address)


def test_a_master_that_could_not_write_how_its_job_ended_leaves_where_it_was(job, monkeypatch):
    """Without its address, the job would be taken for one whose master is starting."""
    monkeypatch.setattr(Master, "_write_status", lambda master: None)
    serve_here(job, lambda: None)
    assert job.master.exists()


# ---- keys ----


def test_each_role_has_its_own_secret_and_a_pod_mounts_one_key():
    """Which its processes can read."""
    assert {each["metadata"]["name"] for each in made("Secret")} == {f"digits-{role}-tls" for role in Role}
    for role, pod in ((Role.MASTER, parts().master), (Role.WORKER, parts().worker)):
        secrets = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
        assert secrets == [{"secretName": f"digits-{role}-tls", "defaultMode": 0o444}]


# ---- the master's rights ----


@pytest.mark.parametrize("options", [{}, {"gang": True, "num_workers": "2"}])
def test_the_master_has_a_role_in_one_namespace_and_rights_by_name_where_the_api_allows_it(options):
    """It does for all but creating and listing, and for pods and events."""
    (role,), (binding,), (account,) = (made(kind, **options) for kind in ("Role", "RoleBinding", "ServiceAccount"))
    assert {each["metadata"]["namespace"] for each in (role, binding, account)} == {"lab"}
    assert binding["roleRef"]["kind"] == "Role"
    assert [each["name"] for each in binding["subjects"]] == [account["metadata"]["name"]]
    assert not [each for each in manifests.companions(parts(**options)) if each["kind"].startswith("Cluster")]
    resources = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert not {"secrets", "serviceaccounts", "serviceaccounts/token", "*", "pods/exec"} & resources
    for rule in role["rules"]:
        names_of = rule.get("resourceNames", [])
        assert names_of or {*rule["resources"]} <= {"pods", "events"} or rule["verbs"] == ["list"], rule
        assert all(name.startswith("digits-") for name in names_of), rule


def test_the_policies_let_in_the_jobs_pods_and_everybody_to_the_metrics_and_limit_nothing_else():
    own, metrics = (each["spec"] for each in made("NetworkPolicy"))
    pods = {"matchLabels": {names.JOB_LABEL: "digits"}}
    assert (own["podSelector"], own["ingress"]) == (pods, [{"from": [{"podSelector": pods}]}])
    (rule,) = metrics["ingress"]
    assert rule == {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": names.METRICS_PORT}]}
    assert metrics["podSelector"]["matchLabels"][names.ROLE_LABEL] == "master"
    assert own["policyTypes"] == metrics["policyTypes"] == ["Ingress"]
