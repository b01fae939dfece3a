from hydra.plugins.sweeper import Sweeper
class Trials(Sweeper):
    def __init__(self, **k): pass
    def setup(self, *, hydra_context, task_function, config): pass
    def sweep(self, arguments): pass
