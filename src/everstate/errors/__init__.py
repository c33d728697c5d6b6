"""One tree of errors: each has a message, its data, and advice on the next step.

``retryable`` is a fact of the class: the same call may succeed later without anybody changing
anything. ``exit_code`` is what the command line returns, ``http_status`` what the API answers.
Foreign errors (psycopg, librdkafka, Spark) are translated into this tree once, in the room that
is the driver's home. Every class of these modules is an error of the tree, and is imported here.
"""

from everstate.errors.base import EverstateError as EverstateError
from everstate.errors.commands import *
from everstate.errors.declarations import *
from everstate.errors.entities import *
from everstate.errors.log import *
from everstate.errors.outbox import *
from everstate.errors.pipeline import *
from everstate.errors.requests import *
from everstate.errors.servers import *
