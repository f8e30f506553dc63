"""The trainer of examples/ on a node that is lost: after the checkpoint of step 3 its agent and its rank are gone, without a word.

Only where DOOMED is set, which a rank has from its agent; elsewhere it is the trainer."""
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import torchtitan_like  # noqa: E402

LAST = 3


class Doomed(torchtitan_like.Trainer):
    def save(self) -> None:
        super().save()
        if self.step == LAST and "DOOMED" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torchtitan_like.Trainer = Doomed
    torchtitan_like.main()
