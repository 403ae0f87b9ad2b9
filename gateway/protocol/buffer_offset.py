"""The address of an object's bytes in memory, by which a part is found again in the whole."""

from __future__ import annotations

import ctypes

from msgspec import Raw


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer``, whose layout is part of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def address(exporter: bytes | Raw) -> int:
    """The first byte of what ``exporter`` holds; it is there while ``exporter`` lives."""
    buffer = _PyBuffer()
    _get_buffer(exporter, ctypes.byref(buffer), 0)
    found: int = buffer.buf
    _release_buffer(ctypes.byref(buffer))
    return found
