from tests.conftest import no_flow_fails

__all__ = ["no_flow_fails"]  # applies to every test here, too
