/* What of heldin is compiled, as a module of Python: sums over samples, and a short path through
   steps like the last ones. It needs nothing of PyTorch, and fits every Python from 3.10 on. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include "_kernels.c"
#include "_routine.c"

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
#define METHODS(kind) \
    METHOD(ratios_##kind), METHOD(outer_##kind), METHOD(columns_##kind), METHOD(planes_##kind), \
        METHOD(outer_ratios_##kind)

static PyMethodDef methods[] = {METHODS(float),
                                METHODS(double),
                                {"routine", py_routine, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_compiled", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void)
{
    return PyModule_Create(&module);
}
