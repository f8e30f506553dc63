"""Plans of ten known models, and pictures of their HTML reports for docs/gallery.md.

    python -m benchmarks.plans.gallery                      # all: minutes; needs Chromium (Debian: apt-get install chromium)
    python -m benchmarks.plans.gallery --only gpt,llama     # some; the page shows those that have a picture

A picture is the top of the report.
"""
from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT

PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "pictures"
WINDOW, MOST = "900,1000", 150_000
"""Pixels, and bytes of a picture."""
LIMIT = "60"
"""Seconds of a search."""
GALLERY = {
    "mlp": "mlp:wide --mesh dp=2,tp=4 --batch 512",
    "gpt": "gpt:124M --mesh dp=2,tp=4 --batch 32 --seq 1024 --dtype bf16",
    "bert": "bert:base --mesh dp=8 --batch 64",
    "t5": "t5:small --mesh dp=4,tp=2 --batch 32",
    "vit": "vit:b16 --mesh dp=8 --batch 128",
    "resnet": "resnet:50 --mesh dp=8 --batch 256",
    "moe": "moe:small --mesh dp=2,ep=4 --batch 16",
    "dlrm": "dlrm:small --mesh d=8 --batch 2048",
    "llama": "llama:1B --mesh tp=8 --batch 4 --seq 2048 --dtype bf16",
    "llama-zero": "llama:8B --mesh dp=8 --batch 8 --seq 2048 --dtype bf16",
}
"""Picture -> arguments of `autoshard plan`."""


def picture(name: str, chromium: str, folder: Path) -> None:
    """docs/pictures/plan-NAME.png. Raises RuntimeError where it is larger than `MOST`."""
    plan, report, shot = folder / f"{name}.json", folder / f"{name}.html", PICTURES / f"plan-{name}.png"
    command = [sys.executable, "-m", "autoshard", "plan", *GALLERY[name].split(), "--time-limit", LIMIT, "-o", plan, "--html", report]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                    "--force-device-scale-factor=0.8", f"--window-size={WINDOW}", "--virtual-time-budget=4000", f"--screenshot={shot}", report.as_uri()],
                   check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    if shot.stat().st_size > MOST:
        raise RuntimeError(f"{shot} has {shot.stat().st_size:,} bytes, more than {MOST:,}; make the window smaller")
    (PICTURES / f"plan-{name}.txt").write_text(json.loads(plan.read_text())["kind"] + "\n")


def page() -> str:
    lines = ["# Gallery of plans", "",
             f"The top of the [report](report.md) of plans for 8 GPUs of one `h100-dgx`, each with its command, searched for {LIMIT} s at most. Planning needs no GPU",
             "and none ran: seconds are prices of the [profile](costs.md). `python -m benchmarks.plans.gallery` makes the plans, the pictures and this page anew.", ""]
    for name, arguments in GALLERY.items():
        kind = PICTURES / f"plan-{name}.txt"
        if kind.exists():
            text = kind.read_text().strip()
            lines += [f"## {arguments.split()[0]} on {arguments.split()[2]}", "", f"    autoshard plan {arguments} --html report.html", "",
                      f"{text[0].upper()}{text[1:]}.", "", f"![The report of this plan: {text}](pictures/plan-{name}.png)", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of pictures, comma separated; default: all")
    options = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        parser.error("no Chromium on this machine (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only.split(",") if options.only else GALLERY:
            picture(name, chromium, Path(folder))
            print(name, flush=True)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
