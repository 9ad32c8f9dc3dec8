"""A task whose module starts a thread when it is imported, as some libraries do."""

from __future__ import annotations

import threading

from elastic.worker.pretrain import LanguageModel

threading.Thread(target=threading.Event().wait, daemon=True).start()


class Threaded(LanguageModel):
    pass
