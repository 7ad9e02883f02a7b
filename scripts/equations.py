"""Plain-text equations of docstrings as MathML, which browsers typeset without any script.

``w_k <- fit_k(w) + mu/2 |v - w|^2`` is the notation: ``_`` and ``^`` bind the next name, number or group, Greek letters
have their names, ``sum_k``, ``argmin_v`` and the like carry their index below, other words are text. Four spaces end an
equation; what follows is a remark, unless the equation ended in a comma or a colon.

>>> typeset("w_k <- eta w")
'<math displaystyle="true"><msub><mi>w</mi><mi>k</mi></msub><mo>←</mo><mi>η</mi><mi>w</mi></math>'
"""

import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eps": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "lam": "λ", "mu": "μ", "nu": "ν", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "omega": "ω",
    "grad": "∇",
}  # fmt: skip
BELOW = {"sum": "∑", "argmin": "argmin", "min": "min", "max": "max", "mean": "mean"}  # with their index below
NAMES = {"fit", "cos", "log", "sqrt", "score", "rule", "lr"}  # upright, and no text
OPEN = '<div class="equations">'
SIGNS = {"<-": "←", "!=": "≠", "<=": "≤", ">=": "≥", "~": "≈", "-": "−", "*": "·", "...": "…"}
TOKEN = re.compile(
    r"``(?P<code>[^`]*)``|(?P<word>[A-Za-z]+(?:-[A-Za-z]+)+|[A-Za-z]+'s\b|[A-Za-z]+\d?)|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<sign><-|!=|<=|>=|\.\.\.|[^\sA-Za-z\d])|(?P<space>\s+)"
)


def blocks(words: str) -> str:
    """Return a docstring with its indented lines, the equations, as HTML.

    >>> blocks("Mean.\\n\\n    w <- 1    at a site\\n\\nEnd.").splitlines()[3]  # doctest: +ELLIPSIS
    '<div><span>...<mi>w</mi><mo>←</mo><mn>1</mn></math></span><i>...<mtext>at a site</mtext></math></i></div>'
    """
    lines, inside = list[str](), False
    for line in words.splitlines():
        starts = line.startswith("    ")
        lines += ([OPEN] if starts else ["</div>", ""]) if starts != inside else []
        lines.append(_row(line[4:]) if starts else line)
        inside = starts
    return "\n".join([*lines, *["</div>"] * inside])


def _row(line: str) -> str:
    """Return one line: the equation, and the remark to its right."""
    indent = min(len(line) - len(line.lstrip()), 8)
    parts = re.split(r" {4,}", line.strip())
    formula, remark = [parts[0]], list[str]()
    for before, part in pairwise(parts):
        ends = not before.endswith((",", ":")) and not part.startswith(("<-", "="))
        (remark if remark or ends else formula).append(part)
    style = f' style="padding-left: {indent / 2:g}em"' if indent else ""
    made = f"<span{style}>{_joined(formula)}</span>" + (f"<i>{_joined(remark)}</i>" if remark else "")
    return f"<div>{made}</div>"


def _joined(parts: list[str]) -> str:
    return '<b class="quad"></b>'.join(map(typeset, parts))


def typeset(text: str) -> str:
    """Return an equation as MathML.

    >>> typeset("sum_{j != k} x_k^2").removeprefix('<math displaystyle="true">')
    '<munder><mo>∑</mo><mrow><mi>j</mi><mo>≠</mo><mi>k</mi></mrow></munder><msubsup><mi>x</mi><mi>k</mi><mn>2</mn></msubsup></math>'
    """
    return f'<math displaystyle="true">{"".join(_terms(_Tokens(text)))}</math>'


class _Tokens:
    """The tokens of an equation, read one after the other: (kind, text, whether a space comes before)."""

    def __init__(self, text: str):
        self.items, space = [], False
        for token in TOKEN.finditer(text):
            kind = str(token.lastgroup)
            if kind != "space":
                self.items.append((kind, token[kind], space))
            space = kind == "space"
        self.at, self.bars = 0, 0

    def peek(self, ahead: int = 0) -> tuple[str, str, bool]:
        """Return a token that comes, without reading it; an empty one at the end."""
        return self.items[self.at + ahead] if self.at + ahead < len(self.items) else ("end", "", True)

    def next(self) -> tuple[str, str, bool]:
        """Read the next token."""
        token = self.peek()
        self.at += 1
        return token


def _terms(tokens: _Tokens, end: str = "") -> Iterator[str]:
    """Yield the terms up to a closing bracket, or all."""
    text: list[str] = []
    depth = 0
    while tokens.peek()[0] != "end" and (depth or tokens.peek()[1] != (end or None)):
        depth += {"(": 1, ")": -1}.get(tokens.peek()[1], 0)
        if _is_text(tokens):
            text.append(tokens.next()[1])
            while tokens.peek()[1] in (",", ";", ":") and not tokens.peek()[2]:
                text[-1] += tokens.next()[1]
            continue
        if text:
            yield _words(text)
            text = []
        yield _term(tokens)
    if text:
        yield _words(text)


def _words(text: list[str]) -> str:
    return f"<mtext>{escape(' '.join(text), quote=False)}</mtext>"


def _is_text(tokens: _Tokens) -> bool:
    """Whether the next token is a word of prose, or of code."""
    kind, word, _ = tokens.peek()
    if kind == "code":
        return True
    if kind != "word" or (tokens.peek(1)[1] in ("_", "^") and not tokens.peek(1)[2]):
        return False
    if word in ("a", "A"):
        return tokens.peek(1)[0] == "word" and tokens.peek(1)[2] and _is_prose(tokens.peek(1)[1])
    return _is_prose(word) and not (word in BELOW and tokens.peek(1)[1] == "(")


def _is_prose(word: str) -> bool:
    return len(word.rstrip("0123456789")) > 1 and word.rstrip("0123456789") not in {*GREEK, *NAMES}


def _term(tokens: _Tokens) -> str:
    """Return one name, number or sign with what is below and above it."""
    kind, word, _ = tokens.peek()
    base, below = _atom(tokens), kind == "word" and word in BELOW
    sub = sup = ""
    while (sign := tokens.peek())[1] in ("_", "^", "'", "*") and not sign[2]:
        if sign[1] == "*" and tokens.peek(1)[1] != "_":
            break
        tokens.next()
        if sign[1] == "_":
            sub = _script(tokens)
        else:
            sup += _script(tokens) if sign[1] == "^" else {"'": "<mo>′</mo>", "*": "<mo>∗</mo>"}[sign[1]]
    if sub and kind == "word" and _is_prose(word) and not below:
        return f"<mtext>{word}_{re.sub('<[^>]*>', '', sub)}</mtext>"  # the name of a setting
    if below and sub:
        return f"<munder>{base}{sub}</munder>"
    if sub and sup:
        return f"<msubsup>{base}{sub}{_row_of(sup)}</msubsup>"
    return f"<msub>{base}{sub}</msub>" if sub else f"<msup>{base}{_row_of(sup)}</msup>" if sup else base


def _row_of(parts: str) -> str:
    return parts if parts.startswith("<mrow>") or parts.count("</m") == 1 else f"<mrow>{parts}</mrow>"


def _script(tokens: _Tokens) -> str:
    """Return what is below or above: a group in brackets, a sign with a group, or one name or number."""
    if tokens.peek()[1] in ("{", "("):
        opened = tokens.next()[1]
        inside = "".join(_terms(tokens, "}" if opened == "{" else ")"))
        tokens.next()
        return f"<mrow>{inside}</mrow>"
    if tokens.peek()[1] == "-":
        tokens.next()
        return f"<mrow><mo>−</mo>{_shown_group(tokens) if tokens.peek()[1] == '(' else _term(tokens)}</mrow>"
    kind, word, _ = tokens.peek()
    if kind == "word" and word not in GREEK:
        tokens.next()
        return f"<mi>{word}</mi>" if len(word) != 2 else f"<mrow><mi>{word[0]}</mi><mi>{word[1]}</mi></mrow>"
    return _atom(tokens)


def _shown_group(tokens: _Tokens) -> str:
    """Return a group with its brackets, and what is above it."""
    tokens.next()
    inside = "".join(_terms(tokens, ")"))
    tokens.next()
    group = f'<mrow><mo stretchy="false">(</mo>{inside}<mo stretchy="false">)</mo></mrow>'
    if tokens.peek()[1] != "^":
        return group
    tokens.next()
    return f"<msup>{group}{_script(tokens)}</msup>"


def _atom(tokens: _Tokens) -> str:
    """Return one token as MathML; a root with what it is of."""
    kind, word, spaced = tokens.next()
    if kind == "number":
        return f"<mn>{word}</mn>"
    if word == "sqrt" and tokens.peek()[1] == "(":
        tokens.next()
        inside = "".join(_terms(tokens, ")"))
        tokens.next()
        return f"<msqrt>{inside}</msqrt>"
    if kind == "word":
        name, digit = word.rstrip("0123456789"), word[len(word.rstrip("0123456789")) :]
        if name in BELOW:
            return f"<mo>{BELOW[name]}</mo>"
        shown = f"<mo>{GREEK[name]}</mo>" if name == "grad" else f"<mi>{GREEK.get(name, name)}</mi>"
        shown = f'<mi class="name">{name}</mi>' if name in NAMES else shown
        return f"<msub>{shown}<mn>{digit}</mn></msub>" if digit else shown
    if word == "<" and not tokens.peek()[2]:
        return "<mo>⟨</mo>"
    if word == ">" and not spaced:
        return "<mo>⟩</mo>"
    if word == "|":
        tokens.bars += 1
        return f'<mo stretchy="false" form="{"prefix" if tokens.bars % 2 else "postfix"}">|</mo>'
    stretchy = ' stretchy="false"' if word in "()" else ""
    return f"<mo{stretchy}>{escape(SIGNS.get(word, word), quote=False)}</mo>"
