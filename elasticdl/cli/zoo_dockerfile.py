"""The Dockerfile of a model zoo, as text: `render`."""

from __future__ import annotations

from dataclasses import dataclass

# Also the working directory, so that paths of a job are relative to the zoo.
ZOO_FOLDER = "/model_zoo"
# The user of docker/Dockerfile.*; a number, as Kubernetes can't tell from a name that it is not root's.
_USER = "1000:1000"

# What a zoo's image is better off without.
IGNORED = "\n".join((".git", ".venv", ".dockerignore", "Dockerfile", "**/__pycache__", "**/*.pyc", ""))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the image is made of. Paths are relative to the zoo, and empty where there is nothing of the kind."""

    base_image: str
    requirements: str = ""
    wheels: str = ""
    cluster_spec: str = ""
    extra_pypi_index: str = ""


def render(recipe: Recipe) -> str:
    """Packages come before modules: who changes a module does not install everything again."""
    pip = "RUN pip install --no-cache-dir"
    if recipe.extra_pypi_index:
        pip += f" --extra-index-url {recipe.extra_pypi_index}"
    lines = [
        "# Made by `elasticdl zoo init`; change it as you like. `elasticdl zoo build` builds it.",
        f"FROM {recipe.base_image}",
        "",
        "USER root",
    ]
    if recipe.wheels:
        lines += [f"COPY {recipe.wheels}/*.whl /wheels/", f"{pip} /wheels/*.whl"]
    if recipe.requirements:
        lines += [f"COPY {recipe.requirements} /requirements/", f"{pip} -r /requirements/{recipe.requirements}"]
    # Whatever the modes of its files are, the user can read them then.
    lines += [f"COPY --chown={_USER} . {ZOO_FOLDER}"]
    if recipe.cluster_spec:
        lines += [f"COPY --chown={_USER} {recipe.cluster_spec} /cluster_spec/"]
    lines += ["", f"WORKDIR {ZOO_FOLDER}", f"USER {_USER}", ""]
    return "\n".join(lines)
