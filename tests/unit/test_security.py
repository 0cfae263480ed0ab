"""What docs/security.md says. A mark behind each sentence names its test: here, or where the thing is tested anyway."""

import asyncio
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from shell_kit import NoPlace
from test_common_manifests import parts

from elasticdl.cli import folder_run
from elasticdl.common.certificates import issue
from elasticdl.common.credentials import LOOPBACK, Role, Token, WorkerEnvironment
from elasticdl.job.jobdir import JobDir, MasterAddress, create_job_dir
from elasticdl.job.spec import JobSpec
from elasticdl.kube import manifests, names
from elasticdl.master.core.events import StopRequested
from elasticdl.master.shell.calls import ALLOWED
from elasticdl.master.shell.serve import Master, local_master

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text()
MARK = re.compile(r"<!-- (.*?) -->")
TENANTS = {"pods", "events"}


def made(kind, **options):
    return [each for each in manifests.companions(parts(**options)) if each["kind"] == kind]


# ---- the document ----


def sentences():
    """Each with its mark. Headings and tables have none."""
    body = "\n".join(line for line in DOCUMENT.splitlines() if not line.startswith(("#", "|")))
    texts = MARK.split(body)
    assert not texts[-1].strip(), f"without a mark: {texts[-1].strip()}"
    return list(zip((each.strip() for each in texts[:-1:2]), texts[1::2], strict=True))


def test_every_sentence_of_the_document_has_its_test():
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)}
    assert len(DOCUMENT.splitlines()) <= 80, "it is short"
    for sentence, mark in sentences():
        assert re.search(r"[.!?]$", sentence), f"no sentence: {sentence}"
        assert not re.search(r"[.!?] \S", sentence), f"more than one sentence before a mark: {sentence}"
        if mark not in ("advice", "warning"):
            assert mark.removeprefix("test: ") in tests, f"no such test: {mark}, of: {sentence}"


def test_the_table_of_roles_is_what_the_master_allows():
    rows = re.findall(r"^\| (\w+) \| `(.*?)` \| (.*?) \|$", DOCUMENT, re.MULTILINE)
    assert {role: (secret, calls) for role, secret, calls in rows} == {
        role: (names.tls_name("NAME", role), ", ".join(sorted(_calls(role))) or "none") for role in Role
    }


def _calls(role):
    return [name for name, roles in ALLOWED.items() if role in roles]


# ---- Slurm ----


def test_only_the_user_can_read_the_keys_of_a_slurm_job(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path))
    monkeypatch.setattr(folder_run, "submit", lambda job, spec: "7")
    spec = JobSpec(job_name="mine", launcher="slurm", command=("true",))
    assert folder_run.run_on_slurm(spec, detach=True) == 0
    folder = JobDir(tmp_path / "jobs" / "mine").tls
    assert {each.name for each in folder.iterdir()} == {str(role) for role in Role}
    kinds = {(each.is_dir(), stat.S_IMODE(each.stat().st_mode)) for each in [folder.parent, *folder.rglob("*")]}
    assert kinds == {(True, 0o700), (False, 0o600)}


# ---- this machine ----


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path))
    return create_job_dir("mine")


def test_only_the_user_can_read_a_local_jobs_token(job):
    job.path.chmod(0o755)  # as somebody does who lets a colleague look at the logs
    MasterAddress.of_this_process("127.0.0.1:1", "secret").write(job.master)
    assert stat.S_IMODE(job.master.stat().st_mode) == 0o600
    assert stat.S_IMODE(create_job_dir("another").path.stat().st_mode) == 0o700


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


def test_a_local_jobs_token_is_its_own_and_goes_with_it(job):
    found = []
    for _ in range(2):
        serve_here(job, lambda: found.append(MasterAddress.read(job.master)))
        assert not job.master.exists()
        job.status.unlink()
    assert found[0].token != found[1].token
    assert found[0].address.startswith(LOOPBACK)


def test_a_master_that_could_not_write_how_its_job_ended_leaves_where_it_was(job, monkeypatch):
    """Without its address, the job would be taken for one whose master is starting."""
    monkeypatch.setattr(Master, "_write_status", lambda master: None)
    serve_here(job, lambda: None)
    assert job.master.exists()


def test_a_local_worker_is_given_the_token():
    environment = WorkerEnvironment("127.0.0.1:1", Token("secret"), 0, "job.json").to_env()
    assert "secret" in environment.values()


# ---- keys ----


def test_certificates_are_valid_for_as_long_as_the_document_says():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    each = [pem for files in issue("digits", now).values() for pem in (files.certificate, files.ca)]
    ends = {x509.load_pem_x509_certificate(pem).not_valid_after_utc for pem in each}
    assert ends == {now + timedelta(days=3650)}


def test_a_workers_key_is_good_for_every_worker_and_for_nothing_else():
    """A worker's certificate has no number: which worker calls is what it says itself."""
    (name,) = _names(issue("digits", datetime.now(UTC))[Role.WORKER].certificate)
    assert name == "worker.digits.elasticdl"
    assert _calls(Role.WORKER) == ["Session", "Attend"]


def _names(certificate):
    extension = x509.load_pem_x509_certificate(certificate).extensions
    return extension.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)


@pytest.mark.parametrize("role", [Role.MASTER, Role.WORKER])
def test_a_pod_mounts_one_key_which_its_processes_can_read(role):
    pod = parts().master if role is Role.MASTER else parts().worker
    secrets = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert secrets == [{"secretName": f"digits-{role}-tls", "defaultMode": 0o444}]


# ---- the master's rights ----


def test_the_master_has_a_role_in_one_namespace():
    (role,), (binding,), (account,) = (made(kind) for kind in ("Role", "RoleBinding", "ServiceAccount"))
    assert {each["metadata"]["namespace"] for each in (role, binding, account)} == {"lab"}
    assert binding["roleRef"]["kind"] == "Role"
    assert [each["name"] for each in binding["subjects"]] == [account["metadata"]["name"]]
    assert not [each for each in manifests.companions(parts()) if each["kind"].startswith("Cluster")]


@pytest.mark.parametrize("options", [{}, {"gang": True, "num_workers": "2"}])
def test_the_master_has_no_right_to_secrets(options):
    (role,) = made("Role", **options)
    resources = [resource for rule in role["rules"] for resource in rule["resources"]]
    assert resources
    assert not {"secrets", "serviceaccounts", "serviceaccounts/token", "*", "pods/exec"} & set(resources)


def test_rights_are_for_names_where_the_api_allows_it():
    """It does for all but creating and listing, and for pods."""
    (role,) = made("Role")
    for rule in role["rules"]:
        if not set(rule["resources"]) & TENANTS and rule["verbs"] != ["list"]:
            assert rule["resourceNames"], rule
            assert all(name.startswith("digits-") for name in rule["resourceNames"]), rule


def test_rights_to_pods_and_events_are_for_the_namespace():
    (role,) = made("Role")
    wide = {resource for rule in role["rules"] if "resourceNames" not in rule for resource in rule["resources"]}
    assert wide == TENANTS


# ---- the network ----


def test_the_policies_let_in_the_jobs_pods_and_everybody_to_the_metrics():
    own, metrics = (each["spec"] for each in made("NetworkPolicy"))
    pods = {"matchLabels": {names.JOB_LABEL: "digits"}}
    assert (own["podSelector"], own["ingress"]) == (pods, [{"from": [{"podSelector": pods}]}])
    (rule,) = metrics["ingress"]
    assert rule == {"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": names.METRICS_PORT}]}
    assert metrics["podSelector"]["matchLabels"][names.ROLE_LABEL] == "master"


def test_no_policy_limits_where_a_job_connects_to():
    policies = made("NetworkPolicy")
    assert policies
    assert [each["spec"]["policyTypes"] for each in policies] == [["Ingress"]] * len(policies)
