"""Reading: entities now and at any time, lists, histories, explanations, state of the views."""

from everstate.changes.written import parse_moment as parse_moment
from everstate.serving.answers import ColdRead as ColdRead
from everstate.serving.answers import Entity as Entity
from everstate.serving.answers import Explanation as Explanation
from everstate.serving.answers import Place as Place
from everstate.serving.answers import Version as Version
from everstate.serving.differences import ABSENT as ABSENT
from everstate.serving.differences import Difference as Difference
from everstate.serving.differences import differences as differences
from everstate.serving.reader import Reader as Reader
