"""The commands that a checkout adds to `kvboost bench`, by name."""

from __future__ import annotations

import click

from benchmarks.suite.commands.agents import agents
from benchmarks.suite.commands.batch import batch
from benchmarks.suite.commands.chat import chat
from benchmarks.suite.commands.disk import disk
from benchmarks.suite.commands.encoding import encoding
from benchmarks.suite.commands.evaluation import evaluation
from benchmarks.suite.commands.peers import peers
from benchmarks.suite.commands.placing import homes, mixtures
from benchmarks.suite.commands.quality import quality
from benchmarks.suite.commands.quant import quant
from benchmarks.suite.commands.remote import remote
from benchmarks.suite.commands.store import eviction, lookup

COMMANDS: dict[str, click.Command] = {
    str(command.name): command
    for command in (
        *(agents, batch, chat, disk, encoding, evaluation, eviction, homes, lookup, mixtures, peers, quality),
        *(quant, remote),
    )
}
