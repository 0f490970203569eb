"""Mutants of copies that are made while the training goes on."""

from __future__ import annotations

from .mutant import Mutant

SPREAD = "checkpoint/staging/spread.py"
WITNESS = "checkpoint/staging/witness.py"
QUIET = "checkpoint/staging/quiet.py"
STEPS = "checkpoint/staging/steps.py"
TESTS = (
    "tests/checkpoint/staging/test_spread.py",
    "tests/checkpoint/staging/test_watched.py",
)

MUTANTS = (
    Mutant(
        name="writes are not looked for",
        file=SPREAD,
        old="            self._require(witness, Witness.require_unwritten)\n            if parts",
        new="            if parts",
        tests=TESTS,
    ),
    Mutant(
        name="what is copied is not compared",
        file=SPREAD,
        old="            self._require(witness, Witness.require_same)",
        new="            pass",
        tests=TESTS,
    ),
    Mutant(
        name="memory that is gone is read",
        file=SPREAD,
        old="            self._require(witness, Witness.require_unmoved)\n            copy.target",
        new="            copy.target",
        equivalent="the process would end with it, and no test could tell",
    ),
    Mutant(
        name="a step does not wait for the copies",
        file=SPREAD,
        old="            if is_own or self._concerns(optimizer):",
        new="            if False:",
        tests=TESTS,
    ),
    Mutant(
        name="a step in another thread does not wait for the copies",
        file=SPREAD,
        old="            if is_own or self._concerns(optimizer):",
        new="            if is_own:",
        tests=TESTS,
    ),
    Mutant(
        name="any step in another thread makes the copies",
        file=SPREAD,
        old="            if is_own or self._concerns(optimizer):",
        new="            if True:",
        tests=TESTS,
    ),
    Mutant(
        name="any thread copies what another one trains",
        file=SPREAD,
        old="threading.current_thread() is self._owner or not self._owner.is_alive():",
        new="True:",
        tests=TESTS,
    ),
    Mutant(
        name="nobody copies for a thread that has ended",
        file=SPREAD,
        old="threading.current_thread() is self._owner or not self._owner.is_alive():",
        new="threading.current_thread() is self._owner:",
        tests=TESTS,
    ),
    Mutant(
        name="a rank that never trains again is waited for without end",
        file=SPREAD,
        old="            if time.monotonic() - self._moved_at > limit:",
        new="            if False:",
        tests=TESTS,
    ),
    Mutant(
        name="gradients copy nothing",
        file=SPREAD,
        old="            self._advance(self._share)",
        new="            pass",
        tests=TESTS,
    ),
    Mutant(
        name="a gradient copies all there is",
        file=SPREAD,
        old="            self._advance(self._share)",
        new="            self._advance(None)",
        tests=TESTS,
    ),
    Mutant(
        name="hooks of gradients stay",
        file=SPREAD,
        old="            hook.remove()",
        new="            pass",
        tests=TESTS,
    ),
    Mutant(
        name="a save that was given up goes on copying",
        file=SPREAD,
        old='            self._settle(Cancelled("the save was given up"))',
        new="            pass",
        tests=TESTS,
    ),
    Mutant(
        name="a failure of a copy is raised in the training",
        file=SPREAD,
        old="            except Exception as error:\n                self._settle(error)\n",
        new="            except ZeroDivisionError as error:\n                self._settle(error)\n",
        tests=TESTS,
    ),
    Mutant(
        name="writes to optimizer state are not seen",
        file=QUIET,
        old="                quiet.add(tensor)",
        new="                quiet.holders[storage_id(local_of(tensor))] = []",
        tests=TESTS,
    ),
    Mutant(
        name="buffers are copied late",
        file=QUIET,
        old="for parameter in module.parameters()}",
        new="for parameter in module.state_dict(keep_vars=True).values()}",
        tests=TESTS,
    ),
    Mutant(
        name="averages of weights are copied late",
        file=QUIET,
        old="            if are_named or not known.isdisjoint(parameters):",
        new="            if True:",
        tests=TESTS,
    ),
    Mutant(
        name="frozen weights are copied within the call",
        file=QUIET,
        old="            if are_named or not known.isdisjoint(parameters):",
        new="            if False:",
        tests=TESTS,
    ),
    Mutant(
        name="swapped tensors count the writes of others",
        file=QUIET,
        old="        found.append(_Holder(local.detach(), *extent, is_quiet=True))",
        new="        found.append(_Holder(local, *extent, is_quiet=True))",
        tests=TESTS,
    ),
    Mutant(
        name="writes through a DTensor are not seen",
        file=QUIET,
        old="            found.append(_Holder(tensor, *extent, is_quiet=True))",
        new="            pass",
        tests=("tests/checkpoint/staging/test_sharded.py",),
    ),
    Mutant(
        name="counts of writes are believed",
        file=WITNESS,
        old="            if writes:",
        new="            if False:",
        tests=TESTS,
    ),
    Mutant(
        name="elements are not compared",
        file=WITNESS,
        old="        if found is None or not torch.equal(",
        new="        if found is None or not torch.equal(found, found) and not torch.equal(",
        tests=TESTS,
    ),
    Mutant(
        name="kept elements are those of the tensor as it is later",
        file=WITNESS,
        old="source[_lattice(source)].clone()",
        new="source[_lattice(source)]",
        tests=TESTS,
    ),
    Mutant(
        name="not all bytes are looked at where it was asked for",
        file=WITNESS,
        old="thorough=thorough or copy.source.is_cuda)",
        new="thorough=copy.source.is_cuda)",
        tests=TESTS,
    ),
    Mutant(
        name="what was found to change waits again",
        file=WITNESS,
        old="        if holders is not None and copy.name not in restless:",
        new="        if holders is not None:",
        tests=TESTS,
    ),
    Mutant(
        name="optimizers tell nobody of their steps",
        file=STEPS,
        old="        one.before_step(optimizer)",
        new="        pass",
        tests=TESTS,
    ),
    Mutant(
        name="hooks go while others of their tensor run",
        file=STEPS,
        old="    if in_backward():",
        new="    if False:",
        tests=("tests/checkpoint/staging/test_sharded.py",),
    ),
    Mutant(
        name="the file is written before everything is copied",
        file="checkpoint/saving/job.py",
        old="            self.await_copies(self.spread)",
        new="            pass",
        tests=TESTS,
    ),
    Mutant(
        name="the tensor that has changed is not remembered",
        file="checkpoint/saving/job.py",
        old='            self.ranks.memory["restless"] |= spread.changed',
        new="            pass",
        tests=TESTS,
    ),
    Mutant(
        name="who waits for a save in the training does not copy",
        file="checkpoint/saving/handle.py",
        old="            spread.finish_if_own()",
        new="            pass",
        tests=TESTS,
    ),
)
