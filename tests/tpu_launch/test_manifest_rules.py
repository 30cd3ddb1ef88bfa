"""Manifests keep to the published field rules, whatever the launch; and the rules catch what they are for."""

import copy

import pytest
import yaml
from field_rules import violations
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.slices import GENERATIONS, slice_of
from tpu_launch import manifests
from tpu_launch.launch import Gke, Launch

SHAPES = [
    f"{generation.name}:{'x'.join(map(str, shape))}"
    for generation in GENERATIONS.values()
    for shape in list(generation.shapes())[:12]
]
NAME = st.from_regex(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", fullmatch=True)


@st.composite
def launches(draw):
    shares = draw(st.integers(1, 9999))
    place = Gke(
        pool=draw(st.integers(1, 64)),
        namespace=draw(NAME),
        queue=draw(st.none() | NAME),
        spot=draw(st.booleans()),
        service_account=draw(st.none() | NAME),
    )
    letters = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"))  # which a launch refuses
    text = st.text(letters, min_size=1, max_size=30)
    launch = Launch(
        preset="quickstart",
        output="gs://bucket/" + draw(text),
        shares=shares,
        source="git+https://example.org/looped.git@v1",
        slice=draw(st.sampled_from(SHAPES)),
        slices=draw(st.integers(1, 8)),
        secrets=draw(st.sampled_from([{}, {"WANDB_API_KEY": "wandb"}])),
        gke=place,
    )
    return launch, place, draw(st.integers(1, shares))


def objects(launch, place, share):
    return [*manifests.queue(launch, place), manifests.jobset(launch, place, share)]


@pytest.mark.parametrize("text", ["a\x85", "a\u2028b", "\u2029\n", "a: 'b\"#\n\tc", " x\n\n", "on", "1e3"])
def test_text_survives_yaml(text):
    assert yaml.safe_load(manifests.to_yaml([{"text": text}])) == {"text": text}


@settings(deadline=None, max_examples=100)
@given(launches())
def test_every_manifest_keeps_to_the_field_rules_and_survives_yaml(drawn):
    made = objects(*drawn)
    assert [violations(item) for item in made] == [[]] * len(made)
    assert list(yaml.safe_load_all(manifests.to_yaml(made))) == made


@settings(deadline=None, max_examples=100)
@given(launches())
def test_pods_chips_and_quota_add_up_to_the_slices(drawn):
    launch, place, share = drawn
    wanted = slice_of(launch.slice, launch.slices)
    (own,) = manifests.jobset(launch, place, share)["spec"]["replicatedJobs"]
    job = own["template"]["spec"]
    limits = job["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert own["replicas"] * job["parallelism"] * limits["google.com/tpu"] == wanted.chips
    assert job["parallelism"] == job["completions"]
    for flavor, queue in [manifests.queue(launch, place)[:2]] if place.queue is None else []:
        (group,) = queue["spec"]["resourceGroups"]
        assert group["flavors"][0]["resources"][0]["nominalQuota"] == place.pool * wanted.chips
        assert flavor["spec"]["nodeLabels"] == job["template"]["spec"]["nodeSelector"]


LAUNCH = Launch(
    "quickstart",
    "gs://b/s",
    4,
    "git+https://example.org/looped.git@v1",
    slice="v5e:4x4",
    gke=Gke(pool=2, spot=True),
)


def spoil(path, value):
    """A sound set of objects with one field of one of them changed; a value of None takes it away."""
    made = copy.deepcopy({item["kind"]: item for item in objects(LAUNCH, LAUNCH.gke, 1)})
    *steps, last = path
    place = made
    for step in steps:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return [violation for item in made.values() for violation in violations(item)]


JOB = ("JobSet", "spec", "replicatedJobs", 0, "template", "spec")
POD = (*JOB, "template", "spec")
QUEUE = ("ClusterQueue", "spec", "resourceGroups", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("JobSet", "metadata", "name"), "x" * 50),
        (("JobSet", "metadata", "name"), "Has-Capitals"),
        (("JobSet", "metadata", "labels", "looped-share"), "1/8"),
        (("JobSet", "spec", "failurePolicy", "rules", 0, "action"), "Restart"),
        (("JobSet", "spec", "failurePolicy", "rules", 0, "name"), "start-again"),
        (("JobSet", "spec", "failurePolicy", "rules", 0, "onJobFailureReasons"), ["Preempted"]),
        (("JobSet", "spec", "failurePolicy", "restartStrategy"), "Always"),
        (("JobSet", "spec", "replicas"), 1),
        ((*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "values"), [0]),
        ((*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "containerName"), "other"),
        ((*JOB, "podFailurePolicy", "rules", 0, "action"), "Retry"),
        ((*POD, "restartPolicy"), "OnFailure"),
        ((*POD, "containers"), None),
        ((*POD, "containers", 0, "resources", "requests", "google.com/tpu"), 8),
        (("LocalQueue", "metadata", "namespace"), None),
        (("LocalQueue", "apiVersion"), "kueue.x-k8s.io/v1beta1"),
        ((*QUEUE, "coveredResources"), ["cpu"]),
        ((*QUEUE, "flavors", 0, "resources", 0, "nominalQuota"), -1),
        (("ResourceFlavor", "spec", "tolerations", 0, "effect"), "Never"),
    ],
)
def test_the_rules_catch_a_broken_manifest(path, value):
    assert spoil(("JobSet", "metadata", "name"), "sound") == []
    assert spoil(path, value)
