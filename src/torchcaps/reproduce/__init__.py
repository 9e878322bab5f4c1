"""Published experiments, rerun: trained by a recipe over seeds, tested after the last epoch, beside the paper's numbers

torchcaps reproduce                              what there is
torchcaps reproduce su --arms mean_pooling su_second --seeds 0 1 2 --root DATA
torchcaps reproduce --page docs/results.md       the page of results, from the records alone

    plan.py       what a reproduction is             su.py, capsnet.py, ...   the tables of each
    running.py    one network: train, test, record   measures.py              shares of test items
    records.py    results/NAME.json                  page.py                  tables and curves of the records
    experts.py    capsules without labels: runs, records and tables of their own
"""

from torchcaps.reproduce.plan import Arm, Reproduction, Test
from torchcaps.reproduce.running import Settings, reproduce
from torchcaps.reproduce.table import REPRODUCTIONS

__all__ = ["REPRODUCTIONS", "Arm", "Reproduction", "Settings", "Test", "reproduce"]
