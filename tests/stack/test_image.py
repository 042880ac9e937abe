"""image: the Dockerfile, its context, and what runs inside it."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from fake_server import Behavior, serving
from lab import ROOT, changes_nothing, mentions, replace
from stackkit import build, image, pins, recipes, standin

DOCKERFILE = ROOT / "Dockerfile.rocm"
PROJECT = pins.load(ROOT)
PIN = PROJECT.pin(None)
DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture
def project(lab):
    """The lab with this project's Dockerfile, scripts and recipes."""
    shutil.copy(DOCKERFILE, lab.root)
    shutil.copytree(ROOT / "scripts" / "image", lab.root / "scripts" / "image")
    shutil.copytree(
        ROOT / "scripts" / "recipes" / "v0.22.0",
        lab.root / "scripts" / "recipes" / "v1.2.0",
    )
    base = "vllm/vllm-openai-rocm:v1.2.0-base"
    replace(lab.root / "stack.toml", '"image:1"', f'"{base}"')
    for name in ("core-alpha", "docs-crlf", "core-beta", "misc-names", "core-more"):
        path = lab.patches / f"{name}.patch"
        replace(path, "Concern: small", f"Concern: {name}")
    return lab


# -- the Dockerfile --------------------------------------------------------------


def parsed(text: str | None = None) -> list[dict]:
    """Its instructions: ``instruction`` and ``value``."""
    text = DOCKERFILE.read_text() if text is None else text
    return DockerfileParser(fileobj=io.BytesIO(text.encode())).structure


def values(instruction: str) -> list[str]:
    return [x["value"] for x in parsed() if x["instruction"] == instruction]


def stages() -> dict[str, str]:
    found = {}
    for value in values("FROM"):
        base, _, name = re.fullmatch(r"(\S+)( AS (\S+))?", value).groups()
        found[name] = base
    return found


def hadolint(text: str) -> str:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run(
        [program, "--no-color", "-"], input=text, capture_output=True, text=True
    )
    return done.stdout + done.stderr


def test_hadolint_finds_nothing():
    assert hadolint(DOCKERFILE.read_text()) == ""


@pytest.mark.parametrize(
    "old, new, rule",
    [
        ("RUN python3 /app", "RUN sudo python3 /app", "DL3004"),
        ("WORKDIR /src\n", "WORKDIR src\n", "DL3000"),
        ('ENTRYPOINT ["vllm", "serve"]', "ENTRYPOINT vllm serve", "DL3025"),
        ("AS serve-nonroot", "AS serve", "DL3024"),
        ('"${VLLM_CACHE_ROOT}"', "$(echo $VLLM_CACHE_ROOT)", "SC2"),
    ],
)
def test_hadolint_would_find_something(old, new, rule):
    text = DOCKERFILE.read_text()
    assert old in text
    assert rule in hadolint(text.replace(old, new, 1))


def test_targets_and_stages_agree():
    assert set(image.TARGETS) < set(stages())
    for base in stages().values():  # and no stage is named that is not there
        assert base in (*stages(), "scratch", "${BASE_IMAGE}", "${RELEASE_IMAGE}")


def test_defaults_are_those_of_stack_toml():
    defaults = dict(x.split("=", 1) for x in values("ARG") if "=" in x)
    assert defaults == {
        "BASE_IMAGE": PIN.toolchain.base_image,
        "RELEASE_IMAGE": image.release_image(PIN),
        "ROCM_ARCH": "gfx942",
    }
    image.require_pinned(defaults["BASE_IMAGE"], PIN)
    image.require_pinned(defaults["RELEASE_IMAGE"], PIN)


def test_the_command_gives_every_argument_and_no_other(project):
    found = project.ok("image", "--dry-run", "--json").json
    declared = {x.split("=")[0] for x in values("ARG")}
    assert set(found["arguments"]) | {"MAX_JOBS"} == declared
    for name, value in found["arguments"].items():
        assert f"{name}={value}" in found["command"]


def test_every_copied_file_is_in_the_context(project):
    context = Path(project.ok("image", "--context-only", "--json").json["context"])
    sources = []
    for value in values("COPY"):
        if "--from=" not in value:
            sources += [x for x in value.split()[:-1] if not x.startswith("--")]
    assert len(set(sources)) >= 7
    for source in sources:
        assert (context / source).exists(), source
    copied = {source.split("/")[0] for source in sources}
    assert {path.name for path in context.iterdir()} == copied


def test_every_file_copied_from_a_stage_is_there():
    """From the source stage: in the base tree; the others are made in theirs."""
    for value in values("COPY"):
        if match := re.search(r"--from=(\S+)", value):
            assert match[1] in stages()
    text = DOCKERFILE.read_text()
    used = set(re.findall(r"/app/mi300x/(\w+\.py)", text)) | {"overlay.py"}
    assert used == {p.name for p in (ROOT / "scripts" / "image").glob("*.py")}


def test_environment_is_that_of_the_recipes():
    lines = " ".join(values("ENV"))
    told = dict(re.findall(r"(\w+)=(\S+)", lines))
    wanted = recipes.read_environment(recipes.folder(PROJECT, PIN) / "mi300x.env")
    assert {key: told.get(key) for key in wanted} == wanted
    # AITER would no longer find what was built with it.
    assert "AITER_JIT_DIR" not in told


def test_every_cache_lies_in_the_folder_that_group_0_may_write():
    told = dict(re.findall(r"(\w+)=(\S+)", " ".join(values("ENV"))))
    caches = ("HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR",
              "TORCHINDUCTOR_CACHE_DIR")  # fmt: skip
    made = next(x for x in values("RUN") if x.startswith("install -d"))
    assert "-o 2000 -g 0 -m 2775 /var/cache/mi300x" in made
    for name in caches:
        assert told[name].startswith("/var/cache/mi300x/")
        assert f'"${{{name}}}"' in made


def test_what_the_image_promises_is_in_the_dockerfile():
    text = DOCKERFILE.read_text()
    assert values("USER") == ["2000:0"]
    (check,) = values("HEALTHCHECK")
    assert "--start-period=30m" in check and "healthcheck.py" in check
    for words in ("pip check", "check_image.py --arch", "type=cache", "--no-deps",
                  "--no-build-isolation", "--constraint"):  # fmt: skip
        assert words in text
    for line in values("RUN"):
        if "pip install" in line:  # PyTorch stays the one of the base
            assert "--constraint" in line or "--no-deps" in line
    (labels,) = values("LABEL")
    for key in ("title", "description", "source", "documentation", "licenses",
                "vendor", "version", "revision", "created", "base.name",
                "base.digest"):  # fmt: skip
        assert f"org.opencontainers.image.{key}=" in labels
    told = dict(re.findall(r'(\S+)="\$\{(\w+)\}"', labels))
    for key, argument in {
        "org.opencontainers.image.version": "STACK_VERSION",
        "org.opencontainers.image.revision": "REVISION",
        "org.opencontainers.image.base.name": "BASE_IMAGE",
        "org.opencontainers.image.base.digest": "BASE_DIGEST",
        "mi300x.vllm.tag": "VLLM_TAG",
        "mi300x.vllm.commit": "VLLM_COMMIT",
        "mi300x.tree": "STACK_TREE",
        "mi300x.series.sha256": "SERIES_SHA256",
    }.items():
        assert told[key] == argument


def test_the_record_of_the_image_is_made_before_it_is_checked():
    made = next(x for x in values("RUN") if "check_image.py" in x)
    first, second = (part.split() for part in made.split(" && "))
    assert first == "cat /app/mi300x/versions.txt >> /app/versions.txt".split()
    assert second[:2] == ["python3", "/app/mi300x/check_image.py"]


def test_what_pip_and_the_compiler_make_is_cached():
    for line in values("RUN"):
        if "pip install" in line and "--no-cache-dir" not in line:
            assert "--mount=type=cache,target=/root/.cache/pip" in line
    (line,) = (x for x in values("RUN") if "pip wheel" in x)
    ccache = dict(re.findall(r"(\w+)=(\S+)", " ".join(values("ENV"))))["CCACHE_DIR"]
    assert f"--mount=type=cache,target={ccache} " in line


def test_group_0_may_write_what_it_must():
    made = next(x for x in values("RUN") if x.startswith("install -d"))
    assert "chmod -R g+rwX /home/vllm" in made and "chmod g+w /etc/passwd" in made
    assert "useradd --uid 2000 --gid 0" in made
    (jit,) = (x for x in values("RUN") if 'find_spec("aiter")' in x)
    assert jit.startswith("chmod -R g+rwX ") and jit.endswith(')/jit"')


# -- the command -----------------------------------------------------------------


def test_a_plan_prints_the_command_and_writes_nothing(project):
    with changes_nothing(project):
        result = project.ok("image", "--dry-run")
    mentions(result, "docker buildx build", "--sbom=true", "--provenance=mode=max",
             "ROCM_ARCH=gfx942", "--target serve ")  # fmt: skip
    version = project.ok("version").out.strip()
    mentions(result, f"--tag vllm-mi300x:{version.replace('+', '-')}")


def test_a_digest_of_the_base_goes_into_the_label(project):
    base = f"vllm/vllm-openai-rocm@{DIGEST}"
    found = project.ok("image", "--dry-run", "--json", "--base", base).json
    assert found["arguments"]["BASE_IMAGE"] == base
    assert found["arguments"]["BASE_DIGEST"] == DIGEST


@pytest.mark.parametrize(
    "base, words",
    [
        ("vllm/vllm-openai-rocm:latest", "is not pinned"),
        ("vllm/vllm-openai-rocm", "is not pinned"),
        ("rocm/vllm-dev:base", "is not pinned"),
        ("vllm/vllm-openai-rocm:nightly-base", "is not pinned"),
        (f"vllm/vllm-openai-rocm@{DIGEST[:-1]}", "is not pinned"),
        ("vllm/vllm-openai-rocm:v0.22.0-base", "is of v0.22.0-base, the stack of v1.2"),
    ],
)
def test_a_base_that_can_change_or_is_of_another_release_is_refused(
    project, base, words
):
    result = project.run("image", "--dry-run", "--base", base)
    assert result.code == 2
    mentions(result, words, "mend: use vllm/vllm-openai-rocm:v1.2.0-base")


def test_a_wrong_gpu_and_a_wrong_target_are_usage_errors(project):
    assert project.run("image", "--arch", "gfx1100").code == 2
    assert project.run("image", "--target", "serv").code == 2


def test_the_wheel_alone_goes_where_build_puts_it(project):
    found = project.ok("image", "--dry-run", "--json", "--target", "export").json
    where = project.root / "build" / "dist" / "v1.2.0"
    assert f"type=local,dest={where}" in found["command"]


def docker(lab, script: str) -> dict[str, str]:
    """A program docker on PATH."""
    folder = lab.folder / "bin"
    folder.mkdir()
    program = folder / "docker"
    store = '[ "$2" = --format ] && echo "[[driver-type io.containerd.snapshotter.v1]]"'
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {lab.folder}/docker.log\n{script}\n'.replace(
            "STORE", store
        )
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}/usr/bin:/bin"}


def test_without_docker_it_is_a_sentence(project, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = project.run("image")
    assert result.code == 1
    mentions(result, "docker is not installed", "scripts/stack build")


@pytest.mark.parametrize(
    "script, words",
    [
        ('[ "$1" = buildx ] && exit 1; exit 0', "docker has no buildx plugin"),
        ('[ "$1" = info ] && { echo no socket >&2; exit 1; }; exit 0',
         "the docker daemon cannot be reached no socket"),
        ('STORE; [ "$2" = build ] && exit 17; exit 0',
         "docker buildx build ended with 17"),
        ("exit 0", "cannot keep the SBOM and the provenance"),
    ],
)  # fmt: skip
def test_a_docker_that_fails_is_a_sentence(project, script, words):
    result = project.run("image", env=docker(project, script))
    assert result.code == 1
    mentions(result, words, "mend:")


def test_docker_is_given_the_command_and_the_context(project):
    result = project.ok("image", env=docker(project, "STORE; exit 0"))
    mentions(result, "made vllm-mi300x:1.2.0-rocm722")
    last = (project.folder / "docker.log").read_text().splitlines()[-1]
    assert last.endswith(str(project.root / "build" / "image" / "v1.2.0"))
    assert f"--file {project.root}/Dockerfile.rocm" in last


def test_a_store_that_keeps_no_attestations_is_given_none(project):
    project.ok("image", "--no-attestations", env=docker(project, "exit 0"))
    last = (project.folder / "docker.log").read_text().splitlines()[-1]
    assert "--sbom" not in last and "--provenance=false" in last


# -- the context -----------------------------------------------------------------


def test_the_record_names_release_tree_and_every_patch_with_its_hash(project):
    context = Path(project.ok("image", "--context-only", "--json").json["context"])
    text = (context / "versions.txt").read_text()
    told = dict(line.split(": ", 1) for line in text.splitlines())
    project.ok("apply")
    assert told["MI300X_TREE"] == project.git("rev-parse", "HEAD^{tree}")
    assert told["MI300X_VLLM_TAG"] == "v1.2.0"
    assert told["MI300X_VERSION"] == project.ok("version").out.strip()
    for number, line in enumerate(project.series(), 1):
        content = (project.patches / line).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        entry = told[f"MI300X_PATCH_{number:02}"]
        assert entry.startswith(f"{line.removesuffix('.patch')} sha256:{digest} I")
    for line in (context / "patched-files.sha256").read_text().splitlines():
        digest, name = line.split("  ")
        content = (project.tree / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=context
    )
    assert done.returncode == 0


def test_one_changed_byte_of_a_patch_changes_the_series_hash(project):
    def series():
        found = project.ok("image", "--dry-run", "--json").json
        return found["arguments"]["SERIES_SHA256"]

    before = series()
    replace(project.patches / "core-beta.patch", "It was wrong", "It WAS wrong")
    assert series() != before


def test_a_context_is_whole_or_the_one_before(project):
    context = Path(project.ok("image", "--context-only", "--json").json["context"])
    (context / "stray").write_text("x")
    project.ok("image", "--context-only")
    assert not (context / "stray").exists()
    project.ok("clean")
    assert not context.exists()


# -- what runs in the image ------------------------------------------------------

VERSION = "0.22.0+rocm722.mi300x.16.g01234567"


class Installed:
    """A made-up image: its record, its packages."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.site = folder / "site"
        self.package("torch", "2.10.0+git8514f05")
        self.torch("2.10.0+git8514f05", "'7.2.2'")
        self.package("vllm", VERSION)
        for name in ("_C", "_rocm_C", "_moe_C"):
            self.put(f"site/vllm/{name}.abi3.so", "x amdgcn-amd-amdhsa--gfx942 x")
        self.put("site/vllm/ops.py", "patched = True\n")
        digest = hashlib.sha256(b"patched = True\n").hexdigest()
        self.put("patched-files.sha256", f"{digest}  vllm/ops.py\n")
        self.put(
            "versions.txt",
            "AITER_BRANCH: v0.1.13\nMI300X_TORCH: 2.10.0+git8514f05\n"
            f"MI300X_VERSION: {VERSION}\n",
        )

    def put(self, path, text):
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def package(self, name, version):
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.put(f"site/{name}-{version}.dist-info/METADATA", text)

    def torch(self, version, hip):
        text = f"__version__ = {version!r}\nclass version: hip = {hip}\n"
        self.put("site/torch/__init__.py", text)

    def run(self, script, *options):
        done = subprocess.run(
            [sys.executable, "-S", ROOT / "scripts" / "image" / script, *options],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def check(self, arch="gfx942"):
        return self.run("check_image.py", "--versions", self.folder / "versions.txt",
                        "--sums", self.folder / "patched-files.sha256",
                        "--arch", arch)  # fmt: skip


@pytest.fixture
def installed(tmp_path):
    return Installed(tmp_path / "image")


def test_a_good_image_says_what_is_in_it(installed):
    done = installed.check()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"MI300X_VERSION: {VERSION}" in done.stdout


@pytest.mark.parametrize(
    "break_, words",
    [
        (lambda x: x.torch("2.10.0+git8514f05", "None"), "is not built for ROCm"),
        (lambda x: x.torch("2.11.0", "'7.2'"), "was 2.10.0+git8514f05 in the base"),
        (lambda x: x.put("versions.txt", "MI300X_TORCH: 2.10.0+git8514f05\n"
                         "MI300X_VERSION: 0.22.0\n"), "the record says 0.22.0"),
        (lambda x: x.put("site/vllm/ops.py", "patched = true\n"),
         "vllm/ops.py is not the patched file"),
        (lambda x: (x.site / "vllm/ops.py").unlink(), "vllm/ops.py is missing"),
        (lambda x: x.put("patched-files.sha256", ""), "is empty"),
        (lambda x: (x.site / "vllm/_C.abi3.so").unlink(), "vllm/_C.abi3.so is missing"),
        (lambda x: x.put("site/vllm/_C.abi3.so", "gfx90a"), "has no code for gfx942"),
    ],
)  # fmt: skip
def test_an_image_that_is_not_what_it_says_is_found_out(installed, break_, words):
    break_(installed)
    done = installed.check()
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    "break_, words",
    [
        (lambda x: (x.folder / "versions.txt").unlink(), "versions.txt does not exist"),
        (lambda x: (x.folder / "patched-files.sha256").unlink(),
         "no image of the whole stack"),
        (lambda x: shutil.rmtree(x.site / f"vllm-{VERSION}.dist-info"),
         "vLLM is not installed"),
        (lambda x: x.put("versions.txt", "AITER_BRANCH: v0.1.13\n"),
         "the record says None"),
        (lambda x: x.put("site/torch/__init__.py", "raise OSError('libamdhip64.so')\n"),
         "PyTorch cannot be imported: OSError: libamdhip64.so"),
    ],
)  # fmt: skip
def test_another_image_is_a_sentence(installed, break_, words):
    break_(installed)
    done = installed.check()
    assert done.returncode == 1 and words in done.stderr


def test_constraints_hold_every_rocm_package_as_it_is(installed):
    installed.package("triton", "3.4.0+gitba5c1517")
    installed.package("numpy", "2.0")
    done = installed.run("constraints.py")
    assert done.stdout == "torch==2.10.0+git8514f05\ntriton==3.4.0+gitba5c1517\n"
    shutil.rmtree(installed.site / "torch-2.10.0+git8514f05.dist-info")
    done = installed.run("constraints.py")
    assert done.returncode == 1 and "has no PyTorch" in done.stderr


def test_a_base_with_another_pytorch_ends_the_build(installed, project):
    torch = "2.10.0+git8514f05"
    for wanted in (torch, ""):
        assert installed.run("constraints.py", "--torch", wanted).returncode == 0
    done = installed.run("constraints.py", "--torch", "2.11.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"PyTorch is {torch}, the release is built with 2.11.0" in done.stderr
    (line,) = (x for x in values("RUN") if "constraints.py" in x)
    assert '--torch "${TORCH_VERSION}"' in line
    wanted = pins.load(project.root).pin(None).toolchain.torch
    for options, told in ((), wanted), (("--any-toolchain",), ""):
        found = project.ok("image", "--dry-run", "--json", *options).json
        assert found["arguments"]["TORCH_VERSION"] == told


def test_the_health_check_follows_the_server():
    def ask(url):
        script = ROOT / "scripts" / "image" / "healthcheck.py"
        # A proxy is not asked about this very machine.
        env = {"MI300X_HEALTH_URL": f"{url}/health", "http_proxy": "http://127.0.0.1:9"}
        return subprocess.run([sys.executable, script], env=env, stderr=-1).returncode

    with serving(Behavior()) as url:
        assert ask(url) == 0
    assert ask(url) == 1
    with serving(Behavior("unhealthy")) as url:
        assert ask(url) == 1


@pytest.mark.parametrize("url", ["x", "http://127.0.0.1:0/health", "ftp://[/x"])
def test_a_health_check_that_cannot_ask_is_a_sentence(url):
    script = ROOT / "scripts" / "image" / "healthcheck.py"
    env = {"MI300X_HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{url}: ") and "Traceback" not in done.stderr


# -- the stages on a stand-in ----------------------------------------------------


@pytest.fixture
def made(project):
    return build.source(
        pins.load(project.root),
        pins.load(project.root).pin(None),
        (),
        lambda done, total: None,
        lambda what: None,
    )


def states(findings) -> set[str]:
    return {item.state for item in findings}


def test_without_a_builder_the_stages_are_not_run(project, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = project.ok("image", "--stand-in")
    mentions(result, "not run: there is no buildah", "apt-get install", "mend:")
    assert project.run("image", "--stand-in", "--require").code == 1


def test_a_stage_that_lacks_a_byte_of_the_source_is_found_out(project, made, tmp_path):
    project.ok("apply")
    root = tmp_path / "root"
    shutil.copytree(project.tree, root / "src" / "vllm", symlinks=True)
    assert states(standin.source(root, made)) == {"ok"}
    path = root / "src" / "vllm" / "vllm" / "alpha.py"
    path.write_bytes(path.read_bytes()[:-1])
    (found,) = standin.source(root, made)
    assert found.state == "problem" and "vllm/alpha.py" in found.detail
    (root / "src" / "vllm" / "link.py").unlink()
    (found,) = standin.source(root, made)
    assert found.detail.startswith("2 files are wrong")


def test_a_layout_with_another_user_or_mode_is_found_out(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "var" / "cache" / "mi300x" / "vllm").mkdir(parents=True)
    (tmp_path / "etc" / "passwd").write_text("vllm:x:1000:0::/home/vllm:/bin/bash\n")
    assert states(standin.layout(tmp_path)) == {"problem"}


def test_an_overlay_that_is_not_laid_is_found_out(made, tmp_path):
    site = tmp_path / "usr/lib/python3/dist-packages"
    for path, (before, after) in made.overlay.files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(after)
    (tmp_path / "app").mkdir()
    record = tmp_path / "app" / "versions.txt"
    record.write_text(f"MI300X_OVERLAY: {made.overlay_version}\n")
    assert states(standin.overlaid(tmp_path, made)) == {"ok"}
    (site / path).write_bytes(before)
    record.write_text("MI300X_OVERLAY: 1\n")
    assert states(standin.overlaid(tmp_path, made)) == {"problem"}
