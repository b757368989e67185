"""What comes before and after an instruction, of those that Module.walk() yields."""

from jaxllm.compile.hlo import OPERAND, operands


def inputs(at):
    """The instructions of its computation that it reads."""
    names = set(OPERAND.findall(at.instruction.text.split(" = ", 1)[1].split(", calls=")[0]))
    return [instruction for instruction in at.among[: at.position] if instruction.name in names]


def until(at, op):
    """(instructions between, the done), for a start."""
    name, later = at.instruction.name, range(at.position + 1, len(at.among))
    done = next(i for i in later if at.among[i].op == op and name in operands(at.among[i]))
    return at.among[at.position + 1 : done], at.among[done]
