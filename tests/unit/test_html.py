"""Runs and rollouts as HTML: everything foreign is escaped, the mask is the learner's, and the markup is whole."""

import json
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.config import Config
from lightning_ray.observe.html import rollout_html, run_html
from lightning_ray.run_directory import RunDirectory
from lightning_ray.trajectory.call import Call
from lightning_ray.trajectory.samples import call_mask
from tests.unit.trajectories import make_call, make_trajectory

ATTACK = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"&"
VOID = {"img"}


class Elements(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], set(), [], []
        self.feed(text)
        self.close()
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def titles(self):
        return [value for name, value in self.attributes if name == "title"]


def attacked():
    call = make_call(0, [1, 2], [3, 4, 5], version=7)
    fields = {name: getattr(call, name) for name in Call.__slots__}
    call = Call(**{**fields, "text": ATTACK, "dialect": ATTACK, "relation": ATTACK,
                   "messages": json.dumps([{"role": ATTACK, "content": ATTACK, "tool_calls": [ATTACK]}])})
    made = make_trajectory([call], rollout_id=ATTACK)
    made.task_id = made.reason = made.patch = ATTACK
    made.suspicions = [ATTACK]
    return made


def test_nothing_that_a_policy_or_a_harness_wrote_becomes_markup():
    for text in (rollout_html(attacked()), rollout_html(attacked(), decode=lambda _: ATTACK)):
        page = Elements(text)
        assert page.tags <= {"div", "h4", "b", "pre", "span"}
        assert {name for name, _ in page.attributes} <= {"style", "title"}
        assert "".join(page.words).count("alert(1)") >= 6


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_is_shown_as_it_is(first, second):
    made = make_trajectory([], rollout_id="r")
    made.reason, made.patch = first, second
    words = "".join(Elements(rollout_html(made)).words)
    for text in (first, second):
        assert text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "") in (
            words.replace("\r\n", "\n").replace("\r", "\n").replace("\0", ""))


def test_each_token_says_its_logprob_its_version_and_whether_it_is_trained():
    call = make_call(0, range(6), [11, 12, 13, 14], version=3)
    for limit, trained in ((None, 4), (8, 2), (6, 0)):
        titles = Elements(rollout_html(make_trajectory([call]), max_tokens=limit)).titles
        assert len(titles) == 4 and sum(title.endswith(", trained") for title in titles) == trained
        assert limit is None or trained == call_mask(call, limit).sum()
    assert titles[0] == "token 11, log-prob -1.000, version 3, not trained: truncated"
    masked = make_call(0, [1], [2], masked="constrained")
    assert "not trained: constrained" in Elements(rollout_html(make_trajectory([masked]))).titles[0]


def test_tokens_have_their_text_where_it_is_known():
    shown = Elements(make_trajectory([make_call(0, [1], [5, 6])])._repr_html_())
    assert shown.words.count("▪") == 2
    decoded = Elements(rollout_html(make_trajectory([make_call(0, [1], [5, 6])]), decode=lambda ids: f"<{ids[0]}>"))
    assert decoded.words.count("<5>") == decoded.words.count("<6>") == 1


def test_a_run_shows_its_curve_and_its_last_steps(tmp_path):
    run = RunDirectory.create(Config(run={"dir": tmp_path, "name": "a"}))
    assert "0 steps" in run._repr_html_()
    for step in range(1, 13):
        run.append_metrics({"step": step, "pass_rate": step / 12, "heldout_pass_rate": None if step % 6 else 0.5,
                            "rollouts": 8, "tokens_sampled": 100, "tokens_trained": 90, "loss": None, "wall_s": 1.0})
    result = {"rate": 0.5, "passed": 1, "total": 2, "ci95": [0.1, 0.9]}
    (run.root / "summary.json").write_text(json.dumps({"heldout_before": result, "heldout_after": None}))
    page = Elements(run._repr_html_())
    words = "".join(page.words)
    assert "run a: 12 steps" in words and "held-out pass rate before: 0.50 (1 of 2" in words
    assert "img" in page.tags and "12" in page.words and "2" not in page.words, "the last ten steps"
    assert ATTACK not in run_html(ATTACK, [], None)
