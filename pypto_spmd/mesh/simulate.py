"""Host devices for meshes that are larger than the process's one CPU device.

JAX fixes the number of its devices when its backend starts, so they are made before that, at the
moment a mesh asks for them. Nothing here starts a backend, and a process that can have accelerators
keeps its devices as they are.
"""

import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import re

import jax

logger = logging.getLogger(__name__)

# Attributes that JAX makes while it is imported, so that a type checker knows none of them.
_SETTING = "jax_num_cpu_devices"
_PLATFORMS = "jax_platforms"
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def cpu_only() -> bool:
    """Whether JAX's default devices in this process can only be CPUs; starts no backend."""
    platforms = getattr(jax.config, _PLATFORMS)
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not _accelerator_plugins()


def _accelerator_plugins() -> tuple[str, ...]:
    """The plug-ins that JAX itself would look for, in the places where it looks."""
    names = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    namespace = importlib.util.find_spec("jax_plugins")
    if namespace is not None and namespace.submodule_search_locations is not None:
        names |= {m.name for m in pkgutil.iter_modules(namespace.submodule_search_locations)}
    if importlib.util.find_spec("libtpu") is not None:
        names.add("libtpu")
    return tuple(sorted(names))


def cpu_devices_to_come() -> int:
    """How many CPU devices the backend has, or will have once it starts."""
    setting = getattr(jax.config, _SETTING)
    if setting >= 0:
        return setting
    flag = _FLAG.search(os.environ.get("XLA_FLAGS", ""))
    return int(flag.group(1)) if flag else 1


def request_cpu_devices(count: int) -> None:
    """Has JAX start with at least so many CPU devices, where it can still be told.

    Of several processes each has its own share of the devices, which only the person knows.
    """
    if cpu_devices_to_come() >= count or jax.distributed.is_initialized() or backend_is_up():
        return
    jax.config.update(_SETTING, count)
    logger.info("simulating %d host devices (jax.config.update(%r, %d))", count, _SETTING, count)


def backend_is_up() -> bool:
    """Whether a JAX backend has started; starts none.

    JAX has no question for this, but it refuses to change the number of CPU devices from then on.
    """
    before = getattr(jax.config, _SETTING)
    try:
        jax.config.update(_SETTING, before + 1)
    except RuntimeError:
        return True
    jax.config.update(_SETTING, before)
    return False
