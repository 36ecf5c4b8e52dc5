"""Random lengths of pieces, documents, padding and rules."""

from hypothesis import strategies as st

from sharded_cases import Case

RULES = st.fixed_dictionaries(
    {},
    optional={
        "recent_window": st.integers(1, 20),
        "recent_competes": st.booleans(),
        "sink_tokens": st.integers(1, 6),
        "score_threshold": st.sampled_from([-0.5, 0.0, 1.0]),
    },
)


@st.composite
def random_cases(draw, biases=("scores", "own", "none")):
    lengths = draw(
        st.lists(st.integers(0, 30), min_size=2, max_size=5).filter(lambda n: sum(n) > 45)
    )
    heads = draw(st.sampled_from([1, 2]))
    window = draw(st.one_of(st.integers(0, 60), st.tuples(*[st.integers(0, 30)] * heads)))
    documents = draw(st.sampled_from(["", "random", "rows", "tiny"]))
    return Case(
        lengths,
        window,
        draw(st.sampled_from(["normal", "ties", "equal", "falling", "odd"])),
        mask=draw(st.sampled_from(["", "left", "right", "random"])),
        documents=documents,
        bias=draw(st.sampled_from(biases)),
        rule=draw(RULES),
        heads=heads,
    )
