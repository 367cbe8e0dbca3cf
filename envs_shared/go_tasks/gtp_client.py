"""Games with other programs that speak the Go Text Protocol."""

import shlex
import subprocess

from envs_shared.go_tasks.gtp_words import GtpError


class Client:
    """Another program that speaks GTP; a context manager that ends it."""

    def __init__(self, command: str):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(shlex.split(command), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, command: str) -> str:
        """The answer to a command; raises GtpError where the program says `?` or has ended."""
        try:
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise GtpError(f"{command}: the program has ended") from None
        lines = []
        while (line := self.process.stdout.readline()).strip() or (line and not lines):
            lines.append(line)
        answer = "".join(lines).strip()
        if not answer.startswith("="):
            raise GtpError(f"{command}: {answer or 'the program has ended'}")
        return answer[1:].strip()
