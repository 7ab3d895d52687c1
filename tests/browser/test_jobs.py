"""What people do in the console, from the first click to what the fleet has become."""

import json
from typing import Any

import pytest

from ops.client.api import Api
from ops.local.replay_stack import replayed_model
from ops.local.stack import LocalStack
from tests.browser.conftest import HOSTILE, PICTURES, SignIn, expect, serious_faults
from tests.browser.fleet import waiting_plan
from tests.flows.waiting import wait_until


def _confirm(page: Any, verb: str) -> None:
    """Press the button of the open dialog, and wait until it has closed: what it asked for has succeeded."""
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=verb, exact=True).click()
    dialog.wait_for(state="hidden")


def test_a_plan_is_drafted_applied_and_rolled_back(signed_in: SignIn, admin: Api) -> None:
    person = signed_in("operator")
    page = person.page
    for _ in range(2):  # the second one has something to go back to
        person.open("#/plans")
        page.get_by_role("button", name="Draft a plan").click()
        page.get_by_role("button", name="Apply at index").click()
        _confirm(page, "Apply")
        page.get_by_role("button", name="Apply at index").wait_for(state="hidden")
    page.get_by_role("button", name="Roll back …").wait_for()
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / "plan-review.png", full_page=True)
    assert serious_faults(page) == []
    in_force = admin.get("/admin/status")["plan"]["id"]
    assert in_force in page.url, "the page is that of the plan in force"
    page.get_by_role("button", name="Roll back …").click()
    _confirm(page, "Roll back")
    wait_until(lambda: admin.get("/admin/status")["plan"]["id"] != in_force, "another plan is in force")
    (entry, *_) = [row for row in admin.pages("/admin/audit")["data"] if row["action"] == "plan.rollback"]
    assert entry["subject"] == in_force
    assert "browser-operator" in entry["actor"]


def test_instances_move_under_an_open_page(signed_in: SignIn, stack: LocalStack, admin: Api) -> None:
    """A plan that waits is approved, rolled back, and its endpoint pinned; somebody else sees what becomes of it."""
    watcher, person = signed_in("viewer"), signed_in("operator")
    watcher.open("#/models/ebb?region=us-east")
    seen, page = watcher.page, person.page
    seen.evaluate("() => { window.mark = 1; }")
    ready = seen.get_by_role("table", name="Instances").get_by_role("row").filter(has_text="ready")
    total = seen.get_by_role("table", name="Endpoints").get_by_role("row").filter(has_text="us-east")

    def until_ready(count: int) -> None:
        total.get_by_text(f"{count} ready").wait_for()
        expect(ready).to_have_count(count)

    for hours_later, count in ((24, 1), (25, 3)):
        plan = waiting_plan(stack, [("ebb", "us-east", count)], hours_later=hours_later)
        person.open(f"#/plans/{plan}")
        page.get_by_role("main").get_by_text("moves 9 GPUs, the limit is 8").first.wait_for()
        page.get_by_role("button", name="Approve …").click()
        _confirm(page, "Approve and apply")
        until_ready(count)
    page.get_by_role("button", name="Roll back …").click()
    _confirm(page, "Roll back")
    until_ready(1)
    page.wait_for_function("(plan) => !location.hash.endsWith(plan)", arg=plan)
    restored = admin.get("/admin/status")["plan"]["id"]
    assert page.url.endswith(f"#/plans/{restored}")

    person.open("#/plans")
    page.get_by_role("button", name="Pin an endpoint …").click()
    dialog = page.get_by_role("dialog")
    for name, value in (("Model", "ebb"), ("Region", "us-east"), ("Instances", "2"), ("Why", HOSTILE)):
        dialog.get_by_label(name, exact=True).fill(value)
    _confirm(page, "Pin it")
    until_ready(2)
    pin = page.get_by_role("listitem").filter(has_text=HOSTILE)
    assert "2 instances" in pin.inner_text()
    pin.get_by_role("button", name="End it …").click()
    _confirm(page, "End the pin")
    until_ready(1)
    assert admin.get("/admin/pins")["data"] == []
    assert admin.get("/admin/status")["plan"]["id"] == restored, "pins end, and the plan in force is what it was"
    assert seen.evaluate("() => window.mark === 1"), "nobody has loaded the page again"


def test_a_roll_out_is_started_and_rolled_back(signed_in: SignIn, admin: Api) -> None:
    admin.put("/admin/aliases/surf", {"targets": {"flood": 1}})
    person = signed_in("operator")
    person.open("#/aliases")
    page = person.page
    page.get_by_role("button", name="Start a roll-out …").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Alias, or a model's own name").fill("surf")
    dialog.get_by_label("Candidate, a registered model").fill("ebb")
    dialog.get_by_label("Its shares, percent").fill("50, 50")
    dialog.get_by_role("button", name="Start", exact=True).click()
    assert admin.get("/admin/rollouts")["data"] == [], "shares that do not rise are not sent"
    dialog.get_by_label("Its shares, percent").fill("50, 100")
    _confirm(page, "Start")
    row = page.get_by_role("table", name="Roll-outs").get_by_role("row").filter(has_text="surf")
    row.get_by_text("50 % of 50, 100").wait_for()
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / "rollout.png", full_page=True)
    assert serious_faults(page) == []
    assert admin.get("/admin/aliases/surf")["targets"] == {"ebb": 1, "flood": 1}
    row.get_by_role("button", name="Pause").click()
    row.get_by_role("button", name="Resume").click()
    row.get_by_role("button", name="Roll back …").click()
    _confirm(page, "Roll back")
    row.get_by_text("rolled back by").wait_for()
    assert admin.get("/admin/aliases/surf")["targets"] == {"flood": 1}
    admin.delete("/admin/aliases/surf")


def test_a_node_is_drained_and_put_back(signed_in: SignIn, admin: Api) -> None:
    person = signed_in("operator")
    page = person.page
    person.open("#/nodes/us-west-1")
    page.get_by_role("button", name="Drain", exact=True).click()
    _confirm(page, "Drain")
    assert admin.get("/admin/nodes/us-west-1")["draining"]
    page.get_by_role("button", name="Put back into service").click()
    _confirm(page, "Put back")
    assert not admin.get("/admin/nodes/us-west-1")["draining"]


def test_a_chat_is_streamed(signed_in: SignIn) -> None:
    person = signed_in("operator")
    page = person.page
    person.open("#/playground")
    page.get_by_role("combobox", name="Model").select_option("tide")
    page.get_by_role("textbox", name="Message").fill(HOSTILE)
    page.get_by_role("button", name="Send").click()
    page.get_by_text("tokens/s").first.wait_for()
    page.get_by_role("button", name="Send").and_(page.locator(":enabled")).wait_for()
    assert page.evaluate("() => window.pwned") is None
    assert page.get_by_text(HOSTILE).count() >= 1, "markup is shown as what it is: text"


def test_a_model_that_nothing_serves_is_marked(signed_in: SignIn, admin: Api) -> None:
    """The first by its name is served by no instance: another is chosen, and this one says what to do."""
    admin.put("/admin/models/adrift", replayed_model("adrift", 512))
    person = signed_in("operator")
    page = person.page
    person.open("#/playground")
    chosen = page.get_by_role("combobox", name="Model")
    page.wait_for_url("**model=*")
    assert "adrift" not in page.url
    chosen.select_option("adrift")
    page.get_by_text("No instance serves this model now").wait_for()
    assert chosen.locator("option:checked").inner_text() == "adrift (not served)"
    page.screenshot(path=PICTURES / "playground-not-served.png", full_page=True)
    page.get_by_role("textbox", name="Message").fill("Anybody there?")
    person.expected.append("503")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("wait for one, or choose another model").wait_for()
    assert serious_faults(page) == []
    page.get_by_role("combobox", name="Beside it").select_option("tide")
    page.get_by_role("textbox", name="Message").fill("And beside?")
    page.get_by_role("button", name="Send").click()
    beside = page.get_by_role("region", name="Conversation with tide")
    beside.get_by_text("tokens/s").wait_for()
    assert beside.get_by_text("us-").count() >= 1, "the region that served it"
    page.screenshot(path=PICTURES / "playground-beside.png", full_page=True)
    admin.delete("/admin/models/adrift")


def test_one_run_to_compare_asks_for_another(signed_in: SignIn) -> None:
    person = signed_in("viewer")
    page = person.page
    person.open("#/what-if?runs=whatif_0")
    page.get_by_text("choose a second completed run").wait_for()
    page.get_by_role("button", name="Compare none").click()
    page.get_by_text("choose a second completed run").wait_for(state="hidden")
    assert "runs=" not in page.url


def test_a_batch_is_submitted_and_cancelled(signed_in: SignIn, admin: Api) -> None:
    person = signed_in("operator")
    page = person.page
    request = {"model": "tide", "messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 400}
    lines = [
        {"custom_id": f"{HOSTILE}{n}", "method": "POST", "url": "/v1/chat/completions", "body": request}
        for n in range(4000)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    person.open("#/batches")
    page.get_by_role("button", name="Submit a batch …").click()
    page.locator("input[type=file]").set_input_files(
        {"name": "lines.jsonl", "mimeType": "application/jsonl", "buffer": content}
    )
    _confirm(page, "Submit")
    page.wait_for_url("**/batches/batch_*")
    page.get_by_role("button", name="Cancel the batch …").click()
    _confirm(page, "Cancel the batch")
    name = page.url.rsplit("/", 1)[1]
    state = page.get_by_role("region", name="Progress").get_by_role("definition").first
    expect(state).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Cancel the batch …")).to_have_count(0)
    batch = admin.get(f"/admin/batches/{name}")
    assert batch["state"] == "cancelled"
    assert batch["completed"] < len(lines), "what waited never ran"
    (entry, *_) = [row for row in admin.pages("/admin/audit")["data"] if row["action"] == "batch.cancel"]
    assert (entry["subject"], "browser-operator" in entry["actor"]) == (name, True)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Batches").click()
    row = page.get_by_role("table", name="Batches").get_by_role("row").filter(has_text=name[-8:])
    expect(row).to_contain_text("cancelled")
    assert page.evaluate("() => window.pwned") is None


def test_a_key_gets_a_new_secret_that_is_shown_once(signed_in: SignIn) -> None:
    person = signed_in("admin")
    page = person.page
    person.open("#/keys")
    page.get_by_role("button", name="Create a key …").click()
    page.get_by_role("dialog").get_by_label("Name").fill("rotated")
    _confirm(page, "Create")
    shown = page.get_by_role("status").filter(has_text="shown this once").locator("code")
    first = shown.inner_text()
    page.get_by_role("button", name="I have it").click()
    page.get_by_role("row").filter(has_text="rotated").get_by_role("button", name="Rotate …").click()
    _confirm(page, "Rotate")
    assert shown.inner_text() != first
    page.get_by_role("button", name="I have it").click()
    assert first not in page.content()


@pytest.mark.parametrize("link", ["#/plans", "#/nodes/us-west-1", "#/batches", "#/models/tide"])
def test_a_viewer_has_no_button_that_changes_anything(signed_in: SignIn, link: str) -> None:
    person = signed_in("viewer")
    person.open(link)
    page = person.page
    page.get_by_role("main").get_by_role("heading", level=1).wait_for()
    page.wait_for_timeout(800)
    for verb in ("Draft a plan", "Apply", "Pin an endpoint", "Drain", "Submit a batch", "Delete"):
        assert page.get_by_role("button", name=verb).count() == 0, verb
    drain = "fetch('../admin/nodes/us-west-1/drain', {method: 'POST', headers: {'X-CSRF-Token': 'x'}})"
    answer = page.evaluate(f"() => {drain}.then((response) => response.status)")
    person.expected = ["403"]
    assert answer == 403
