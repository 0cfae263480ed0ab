"""Jobs in the folder of jobs, as tests of the command line make them."""

from __future__ import annotations

from google.protobuf import json_format

from elasticdl.cli.__main__ import main
from elasticdl.job.jobdir import JobDir, create_job_dir, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb


def new_job(name: str) -> JobDir:
    job = create_job_dir(name)
    write_aside(job.spec, JobSpec(job_name=name).to_json())
    return job


def ended_job(name: str, **fields: object) -> JobDir:
    job = new_job(name)
    status = pb.JobStatus(job_name=name, **{"phase": "succeeded", "step": 7, "total_steps": 7, **fields})
    write_aside(job.status, json_format.MessageToJson(status))
    return job


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err
