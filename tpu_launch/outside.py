"""Calls of other programs (gcloud, kubectl, ssh): described first, then either run or printed.

A `Call` is data.  `Outside.run` is the only place where one is carried out, and `script` writes the same ones as shell
commands, so that what `--dry-run` prints is what would be done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator

from looped.credentials import without
from looped.errors import UserError
from looped.text import one_line

SECONDS = 180.0
"""A call may take this long: gcloud needs a few seconds to start, and tries again by itself where the service fails."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a program."""

    argv: tuple[str, ...]
    stdin: str = ""
    files: tuple[tuple[str, str], ...] = ()
    """Names and contents of files that it reads, in the folder in which it runs."""
    seconds: float = SECONDS

    @property
    def shell(self) -> str:
        """The call as lines of a POSIX shell."""
        writes = [f"cat > {shlex.quote(name)} {_heredoc(text)}" for name, text in self.files]
        return "\n".join(
            [*writes, f"{shlex.join(self.argv)}{' ' + _heredoc(self.stdin) if self.stdin else ''}"]
        )


def call(
    *argv: str, stdin: str = "", files: Iterable[tuple[str, str]] = (), seconds: float = SECONDS
) -> Call:
    return Call(argv, stdin, tuple(files), seconds)


def _heredoc(text: str) -> str:
    end = "END"
    while end in text.splitlines():
        end += "_"
    return f"<<'{end}'\n{text}{'' if text.endswith(chr(10)) else chr(10)}{end}"


def script(calls: Iterable[Call]) -> str:
    """The calls as a shell script, which does what running them would do."""
    return "\n".join(['cd "$(mktemp -d)"', *(each.shell for each in calls)]) + "\n"


class CallError(UserError):
    """A program that could not be started, failed or took too long; `kind` is one of `KINDS` or `other`."""

    def __init__(self, message: str, kind: str, stderr: str = ""):
        super().__init__(message)
        self.kind, self.stderr = kind, stderr


@dataclasses.dataclass(frozen=True)
class _Kind:
    name: str
    pattern: str
    """Of what the program writes to stderr."""
    remedy: str


# Words of gcloud: SDK 528.0.0, run against a local server that answered as the API does (HTTP status and `status`),
# and the messages of the API itself as users report them.  Words of kubectl 1.32 and OpenSSH 9.
KINDS = (
    _Kind("exists", r"ALREADY_EXISTS|HTTPError 412|\(AlreadyExists\)", "it is there already"),
    _Kind("absent", r"NOT_FOUND: Resource|matched no objects|\(NotFound\)", "look at its name"),
    _Kind(
        "credentials",
        r"active account selected|gcloud auth login|Reauthentication|invalid_grant|UNAUTHENTICATED"
        r"|must be logged in to the server|\(Unauthorized\)|gke-gcloud-auth-plugin",
        "run `gcloud auth login`, and for a cluster `gcloud container clusters get-credentials CLUSTER`",
    ),
    _Kind(
        "quota",
        r"RESOURCE_EXHAUSTED|[Qq]uota .*(exceeded|exhausted)|exceeded quota",
        "delete what holds it (`looped tpu list` shows that), take fewer or smaller slices, or ask for more on the"
        " console's page of quotas",
    ),
    _Kind(
        "zone",
        r"requested zone .* is not supported|[Ll]ocation .* (is not found|was not found)|Unknown zone",
        "`gcloud compute tpus locations list` names the zones",
    ),
    _Kind(
        "accelerator",
        r"accelerator .*(was not found|could not be found)|[Aa]ccelerator type .* (not found|invalid)",
        "`gcloud compute tpus accelerator-types list --zone=ZONE` names what a zone has",
    ),
    _Kind(
        "disabled",
        r"SERVICE_DISABLED|has not been used in project",
        "run `gcloud services enable tpu.googleapis.com`",
    ),
    _Kind("bucket", r"gs://\S+ not found: 404", "make it with `gcloud storage buckets create`, or name another"),
    _Kind(
        "permission",
        r"PERMISSION_DENIED|HTTPError 403|does not have storage\.|\(Forbidden\)",
        "ask for the role that tpu_launch/README.md names",
    ),
    _Kind("jobset", r'no matches for kind "JobSet"|resource type "jobsets"', "install JobSet in the cluster"),
    _Kind("kueue", r'no matches for kind "(ClusterQueue|LocalQueue|ResourceFlavor)"', "install Kueue in the cluster"),
    _Kind("context", r"context .* does not exist|context was not found", "see `kubectl config get-contexts`"),
    _Kind("project", r"valid project ID", "`gcloud projects list` names the ids"),
    _Kind("key", r"Permission denied \(publickey", "put your key on the host, or load it with `ssh-add`"),
    _Kind("host", r"Could not resolve hostname|Host key verification failed", "try `ssh HOST true` by hand"),
    _Kind(
        "connection",
        r"network connectivity|ConnectionError|Connection (refused|reset|timed out|closed)|Unable to connect"
        r"|connection refused|was refused - did you|No route to host|UNAVAILABLE|HTTPError 5\d\d|TLS handshake timeout",
        "try again: what was begun is found and not begun twice",
    ),
)  # fmt: skip
_PASSING = {"connection", "timeout"}

INSTALL = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install) and run `gcloud auth login`",
    "kubectl": "install it with `gcloud components install kubectl gke-gcloud-auth-plugin`",
    "ssh": "install OpenSSH",
}


class Outside:
    """Carries calls out, all in one folder that ends with it."""

    def __init__(self, folder: str):
        self._folder = pathlib.Path(folder)

    def run(self, wanted: Call) -> str:
        """Returns what the program wrote to stdout; raises `CallError` with its reason and a remedy."""
        for name, text in wanted.files:
            (self._folder / name).write_text(text, encoding="utf-8")
        program = wanted.argv[0]
        try:
            done = subprocess.run(
                wanted.argv,
                input=wanted.stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=wanted.seconds,
                cwd=self._folder,
                env=os.environ | {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
            )
        except (FileNotFoundError, PermissionError):
            remedy = INSTALL.get(program, "install it")
            raise CallError(f"{program} is not on PATH; {remedy}.", "missing") from None
        except subprocess.TimeoutExpired:
            raise CallError(
                f"{_brief(wanted)} did not end within {wanted.seconds:.0f} s; look at the network and try again: what"
                " was begun is found and not begun twice.",
                "timeout",
            ) from None
        if done.returncode != 0:
            raise _failed(wanted, done.returncode, done.stderr)
        return done.stdout

    def run_unless(self, wanted: Call, *kinds: str) -> str | None:
        """As `run`, but None where it fails for one of these kinds of reason."""
        try:
            return self.run(wanted)
        except CallError as failed:
            if failed.kind in kinds:
                return None
            raise


@contextlib.contextmanager
def outside() -> Iterator[Outside]:
    """Yields an `Outside` whose folder is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="looped-") as folder:
        yield Outside(folder)


def is_passing(error: UserError) -> bool:
    """Whether the same call may well succeed a moment later."""
    return isinstance(error, CallError) and error.kind in _PASSING


def _failed(wanted: Call, status: int, stderr: str) -> CallError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = next(
        (line for line in lines if line.startswith(("ERROR:", "error:", "Error"))), lines[-1] if lines else ""
    )
    for kind in KINDS:
        if re.search(kind.pattern, stderr):
            if kind.name in ("exists", "absent") or not said:
                said = said or kind.name
            return CallError(f"{_brief(wanted)} failed: {_sentence(said)}; {kind.remedy}.", kind.name, stderr)
    return CallError(
        f"{_brief(wanted)} ended with status {status}: {_sentence(said or 'it said nothing')}; run it by hand"
        " (`--dry-run` prints it) to see more.",
        "other",
        stderr,
    )


def _sentence(line: str) -> str:
    line = re.sub(r"^(ERROR|error): ?(\([\w.-]+\) )?", "", one_line(without(line)))
    return (line if len(line) <= 300 else line[:297] + "…").rstrip(" .;:")


def _brief(wanted: Call) -> str:
    """The program with its first words, which say what was wanted of it without what may be long."""
    words = [wanted.argv[0]]
    for word in wanted.argv[1:]:
        if word.startswith("-"):
            continue
        words.append(word if len(word) <= 80 and "\n" not in word else "…")
        if len(words) == 6:
            break
    return f"`{' '.join(words)}`"
