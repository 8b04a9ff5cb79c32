"""Read compiled machine code with the tools in triton's wheel: what it takes, what its loops spill,
and operands it lost.

ptxas 12.8 loses the start of a wgmma descriptor in some kernels for Hopper: the machine code adds
to a uniform register that nothing has written, and the product's operand begins anywhere. No tool
says a word, so the code is followed here from its entry along every branch.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple

# The capability whose machine code is followed; others name their operands differently.
FOLLOWED = 90


class Instruction(NamedTuple):
    """One instruction: the uniform registers that it reads and writes, as bits, and the places in
    the code that may come next.
    """

    address: str
    reads: int
    writes: int
    following: tuple[int, ...]


def printed(tool: str, cubin: bytes, *options: str) -> str:
    """What ``tool`` of the triton wheel, such as nvdisasm, prints of a cubin."""
    import triton

    path = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [path, *options, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


def machine_code_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled (local and stack) bytes of a thread."""
    usage = printed("cuobjdump", cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def listing(cubin: bytes) -> str:
    """The machine code as text; without nvdisasm's own dataflow, which takes half its time."""
    return printed("nvdisasm", cubin, "--print-code", "--no-dataflow")


def bits(first: str, count: int = 1) -> int:
    """``count`` registers from ``first`` on."""
    return (1 << count) - 1 << int(first)


def operation_and_operands(text: str) -> tuple[str, list[str]]:
    """An instruction's text, taken apart without its predicate."""
    operation, _, operands = re.sub(r"^@\S+\s+", "", text).partition(" ")
    return operation, [operand.strip() for operand in operands.split(",")] if operands else []


def reads_and_writes(text: str) -> tuple[int, int]:
    """The uniform registers of one instruction. Where its width is in doubt, the register that is
    named and no other: what is not known to be read is not found missing.
    """
    operation, operands = operation_and_operands(text)
    uniform = operation.startswith("U")
    pair = 2 if uniform and (".64" in operation or ".WIDE" in operation) else 1
    reads = writes = 0
    # These may name a predicate before the register that they write.
    late = operation.startswith(("R2UR", "VOTEU")) and len(operands) > 1
    target = 1 if late and re.match(r"U?P", operands[0]) else 0
    written = re.fullmatch(r"UR(\d+)", operands[target]) if operands else None
    # Barriers write none.
    if written and not operation.startswith("B"):
        writes = bits(written[1], 4 if operation == "ULDC.128" else pair)
        del operands[target]
    for operand in operands:
        # Two descriptors, a's and b's, begin at one register; a in registers has none.
        if product := re.match(r"gdesc\[UR(\d+)\]", operand):
            a_in_registers = not operands[1].startswith("gdesc")
            reads |= bits(product[1], 4) & ~(bits(product[1], 2) if a_in_registers else 0)
            continue
        if memory := re.match(r"desc\[UR(\d+)\]", operand):
            reads |= bits(memory[1], 2)
        # Of a wide product only the addend is a pair.
        count = pair if ".64" in operation else 1
        for register in re.findall(r"\bUR(\d+)", operand):
            reads |= bits(register, count)
    return reads, writes


def lines_of_code(text: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Address and text of a listing's instructions, and the place of each label."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"([.$\w]+):$", line):
            labels[label[1]] = len(code)
        elif line_of_code := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", line):
            code.append((line_of_code[1], line_of_code[2]))
    return code, labels


def spills_in_loops(text: str) -> int:
    """How often the innermost loops of products of a listing store or load a spilled register."""
    code, labels = lines_of_code(text)
    loops = [
        (labels[name], place)
        for place, (_, line) in enumerate(code)
        if "BRA" in line
        for name in re.findall(r"`\(([^)]+)\)", line)
        if labels.get(name, place + 1) <= place
    ]
    spilled = 0
    for first, last in loops:
        inner = any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
        body = [line for _, line in code[first : last + 1]]
        if not inner and any("GMMA" in line for line in body):
            spilled += sum(bool(re.search(r"\b(STL|LDL)\b", line)) for line in body)
    return spilled


def instructions(text: str) -> tuple[list[Instruction], list[int]]:
    """The instructions of a listing of nvdisasm, and the places where its functions begin."""
    code, labels = lines_of_code(text)
    returns = tuple(i + 1 for i, (_, text) in enumerate(code) if "CALL." in text)
    found = []
    for place, (address, text) in enumerate(code):
        after = [to for to in following(place, text, labels, returns) if to < len(code)]
        found.append(Instruction(address, *reads_and_writes(text), tuple(after)))
    entries = [place for name, place in labels.items() if name.startswith(".text.")]
    if not found or not entries:
        raise RuntimeError("nvdisasm printed no machine code")
    return found, entries


def following(
    place: int, text: str, labels: dict[str, int], returns: tuple[int, ...]
) -> tuple[int, ...]:
    """The places that may come after an instruction; ``returns``: those after the calls."""
    operation, operands = operation_and_operands(text)
    goes_on = (place + 1,) if text.startswith("@") else ()
    if operation.startswith(("BRX", "JMX")):
        return (*labels.values(), *goes_on)
    if operation.startswith("RET"):
        return (*returns, *goes_on)
    if operation == "EXIT":
        return goes_on
    if operation.startswith(("BRA", "JMP", "CALL")):
        named = (labels[name] for name in re.findall(r"`\(([^)]+)\)", text) if name in labels)
        # A condition may stand among the operands.
        if "CALL" in operation or len(operands) > 1:
            goes_on = (place + 1,)
        return (*named, *goes_on)
    return (place + 1,)


def undefined_registers(text: str) -> tuple[str, ...]:
    """Uniform registers that a listing of nvdisasm reads where no path from its entry has written
    them, each with the address of the first such read. What is made of one counts as not written.
    """
    code, waiting = instructions(text)
    # None where no path has come yet.
    written: list[int | None] = [0 if place in waiting else None for place in range(len(code))]
    while waiting:
        place = waiting.pop()
        _, reads, writes, places = code[place]
        leaving = written[place] or 0
        if reads & ~leaving == 0:
            leaving |= writes
        for to in places:
            known = written[to]
            if known is None or leaving & ~known:
                written[to] = leaving | (known or 0)
                waiting.append(to)
    found: dict[int, str] = {}
    for (address, reads, _, _), known in zip(code, written, strict=True):
        missing = reads & ~known if known is not None else 0
        for register in range(missing.bit_length()):
            if missing >> register & 1:
                found.setdefault(register, address)
    return tuple(f"UR{register}@{address}" for register, address in found.items())
