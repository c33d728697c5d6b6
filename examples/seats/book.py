"""Two guests, one seat: the second waits, is offered the seat when it is free, and takes it."""

import time

from seats import AcceptOffer, BookSeat, CancelSeat, OpenShow, app

from everstate import CommandClient, Provenance, project_config
from everstate.sources.commands import Answer

box_office = Provenance(api_version="v1", service_name="box-office", identifier="till-1")


def say(answer: Answer) -> Answer:
    """Print an answer in a line."""
    facts = ", ".join(f"{each.type} {each.data}" for each in answer.changes)
    print(f"version {answer.version}: {facts or answer.reason or 'nothing to do'}")
    return answer


with CommandClient(project_config(), app) as client:

    def send(command: OpenShow | BookSeat | CancelSeat | AcceptOffer) -> Answer:
        """Send one to Hamlet, and wait."""
        return say(client.send("show", "hamlet", command, provenance=box_office, timeout_s=60))

    send(OpenShow(show_id="hamlet", title="Hamlet", seats=1))
    send(BookSeat(guest="eva"))
    send(BookSeat(guest="tom"))
    send(CancelSeat(guest="eva"))
    # The process manager offers the seat: a command of its own, some milliseconds later.
    while not send(AcceptOffer(guest="tom")).accepted:
        time.sleep(0.2)
