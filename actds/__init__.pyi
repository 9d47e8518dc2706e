"""The public names, for type checkers; how each is found is in ``__init__.py``."""

from actds.errors import ActdsError as ActdsError
from actds.exchange.doctor import doctor as doctor
from actds.exchange.export import export as export
from actds.exchange.importing import import_foreign as import_foreign
from actds.explore.dataset import Dataset as Dataset
from actds.explore.dataset import open as open
from actds.loader.hf import load_dataset as load_dataset
from actds.loader.loader import Loader as Loader
from actds.loader.order import mixing_report as mixing_report
from actds.loader.pools import pool as pool
from actds.publish.card import card as card
from actds.publish.sealing import seal as seal
from actds.publish.signing import sign as sign
from actds.publish.signing import verify as verify
from actds.publish.transfer import pull as pull
from actds.publish.transfer import push as push
from actds.rewrite.recompression import recompress as recompress
from actds.rewrite.redaction import redact as redact
from actds.rewrite.shuffling import shuffle as shuffle
from actds_studies.alerts import alerts as alerts
from actds_studies.attention.api import attention as attention
from actds_studies.monitoring import profile as profile
from actds_studies.regimes.api import regimes as regimes
from actds_studies.stability.api import stability as stability
from actds_studies.steer.api import steer as steer
from actds_studies.view import view as view
from actds_validators.audit.api import audit as audit
from actds_validators.dictionaries.formats import dictionary_feature as dictionary_feature
from actds_validators.gate import check as check
from actds_validators.gate import require as require
from actds_validators.validate.validation import validate as validate
from actds_writers.harvest.attest import attest as attest
from actds_writers.harvest.plan import plan as plan
from actds_writers.harvest.recover import recover as recover
from actds_writers.harvest.replay import replay as replay
from actds_writers.harvest.run import write as write

__version__: str
