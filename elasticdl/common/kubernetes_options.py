"""The options of a job on a Kubernetes cluster; what their values mean is in `elasticdl.common.quantities`.

They have no effect on a job of this machine, and are refused there.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from elasticdl.common.option_group import OptionGroup, fields_of
from elasticdl.common.quantities import (
    class_name,
    keep_text,
    parse_envs,
    parse_priority,
    parse_queue,
    parse_resources,
    parse_secret_envs,
    parse_volumes,
    requirements,
)

Resources = Annotated[str, AfterValidator(keep_text(parse_resources))]


def _only_never(text: str) -> str:
    if text != "Never":
        raise ValueError("must be Never: the master itself replaces workers that are gone")
    return text


def _whole_name(text: str) -> str:
    if re.search(r"\s", text):
        raise ValueError("must be one image without spaces, as in registry.example.com/team/job:1")
    return text


def _namespace(text: str) -> str:
    if not re.fullmatch(r"([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?", text):
        raise ValueError("must be lower-case letters, digits and dashes, as in team-a")
    return text


class KubernetesOptions(OptionGroup):
    """Kubernetes"""

    image: Annotated[str, AfterValidator(_whole_name)] = Field(
        "",
        description="container image of the job, which makes it run on a Kubernetes cluster instead of this machine",
        json_schema_extra={"aliases": ["image_name"]},
    )
    namespace: Annotated[str, AfterValidator(_namespace)] = Field(
        "", description="namespace of the job; if not given, that of the kubeconfig context"
    )
    kube_context: str = Field("", description="context of the kubeconfig; if not given, the current one")
    master_resource_request: Resources = Field(
        "cpu=0.1,memory=1024Mi", description="what the master is promised, as in cpu=0.5,memory=2Gi"
    )
    master_resource_limit: Resources = Field("", description="the most that the master may use, in the same form")
    worker_resource_request: Resources = Field(
        "cpu=1,memory=4096Mi",
        description="what each worker is promised, as in cpu=4,memory=8Gi,gpu=1; gpu stands for nvidia.com/gpu",
    )
    worker_resource_limit: Resources = Field("", description="the most that a worker may use, in the same form")
    master_pod_priority: Annotated[str, AfterValidator(keep_text(class_name))] = Field(
        "", description="PriorityClass of the master"
    )
    worker_pod_priority: Annotated[str, AfterValidator(keep_text(parse_priority))] = Field(
        "",
        description="PriorityClass of the workers, or of a share of the most workers that there may be, as in high=0.5; a share alone is of the class high",
    )
    volume: Annotated[str, AfterValidator(keep_text(parse_volumes))] = Field(
        "",
        description="volumes of every pod, as in claim_name=data,mount_path=/data or host_path=/scratch,mount_path=/scratch, with sub_path, type, read_only=true if you like and ; between two",
    )
    envs: Annotated[str, AfterValidator(keep_text(parse_envs))] = Field(
        "",
        description="environment variables of every pod, as in NAME=VALUE,OTHER=VALUE; kept in a Secret of the job's",
    )
    env_from_secret: Annotated[str, AfterValidator(keep_text(parse_secret_envs))] = Field(
        "",
        description="environment variables of every pod from Secrets of the namespace: NAME=SECRET/KEY for one, SECRET for all of its keys, and , between two",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="when nodes pull the image; if not given, always for the tag latest, else if not present"
    )
    image_timeout: float = Field(
        300.0,
        gt=0,
        description="the job is given up when the master, or no worker ever, could pull the image for so many seconds",
    )
    node_timeout: int = Field(
        10,
        ge=0,
        description="a pod on a node that is not ready or does not answer is given up so many seconds after the cluster has noticed",
    )
    recovery_timeout: float = Field(
        60.0,
        gt=0,
        description="a master that was started again waits so many seconds for the workers to come back, and replaces those who have not",
    )
    restart_policy: Annotated[str, AfterValidator(_only_never)] = Field(
        "Never", description="of a worker's pod; only Never, as the master replaces workers that are gone"
    )
    pod_template: str = Field(
        "",
        description="YAML file with parts of a pod that are merged into every pod of the job: node selector, tolerations, affinity, scheduler, image pull secrets ...; a service account is the workers'",
    )
    master_pod_template: str = Field("", description="the same for the master's pod alone, after --pod_template")
    worker_pod_template: str = Field("", description="the same for the workers' pods alone, after --pod_template")
    cluster_spec: str = Field(
        "", description="Python file with an object `cluster` whose with_pod(pod) and with_service(service) adapt both"
    )
    service_account: str = Field(
        "",
        description="existing service account of the master; if not given, one is made that can do no more than needed",
    )
    gang: bool = Field(False, description="train with all workers or none; --num_workers must be one number then")
    queue: Annotated[str, AfterValidator(keep_text(parse_queue))] = Field(
        "", description="queue in which the workers wait for their places: kueue=QUEUE or volcano=QUEUE"
    )
    elastic: bool = Field(False, description='label the pods `elastic: "true"`, as Run:AI does')

    @model_validator(mode="after")
    def _on_a_cluster(self) -> Self:
        for name, field in fields_of(KubernetesOptions).items() if not self.image else ():
            if getattr(self, name) != field.default:
                raise ValueError(
                    f"--{name} is for a job on a Kubernetes cluster: give --image as well, or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        for role in ("master", "worker"):
            try:
                requirements(getattr(self, f"{role}_resource_request"), getattr(self, f"{role}_resource_limit"))
            except ValueError as error:
                raise ValueError(f"--{role}_resource_request and --{role}_resource_limit: {error}") from None
        return self
