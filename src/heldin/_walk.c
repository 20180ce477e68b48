/* Going through an autograd graph that is expected to look like one seen before. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#define OUTPUTS (1 << 20) /* as in `_graph.py` */

/* Whether a node is met for the first time. The table has a power of two places, half of them
   free at least. */
static int is_new(PyObject **table, size_t places, PyObject *node)
{
    size_t at = ((uintptr_t)node >> 4) * 0x9E3779B97F4A7C15u >> 20;
    for (;; at++) {
        PyObject **place = table + (at & (places - 1));
        if (*place == node) return 0;
        if (!*place) return *place = node, 1;
    }
}

/* 1: the edge leads where it is expected to, 0: elsewhere, -1: an error. */
static int follows(PyObject *edge, int64_t code, PyObject *nodes, PyObject **table, size_t places)
{
    PyObject *child = PyTuple_GetItem(edge, 0), *output = PyTuple_GetItem(edge, 1);
    if (!child || !output) return -1;
    if (code < 0 || child == Py_None) return code < 0 && child == Py_None;
    Py_ssize_t at = (Py_ssize_t)(code / OUTPUTS), known = PyList_Size(nodes);
    if (PyLong_AsLongLong(output) != code % OUTPUTS) return PyErr_Occurred() ? -1 : 0;
    if (at < known) return PyList_GetItem(nodes, at) == child;
    if (at > known || !is_new(table, places, child)) return 0;
    return PyList_Append(nodes, child) < 0 ? -1 : 1;
}

/* Arguments: the roots (a list, to which all other nodes are added), the types of all nodes in
   their order, the type of leaves, the address of the codes of all edges (see `_graph.Form`), and
   a list to which the leaves are added. Gives whether the graph is as expected. */
PyObject *walk_again(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    static PyObject *next_functions, *variable;
    (void)self;
    if (count != 5) return PyErr_SetString(PyExc_TypeError, "wrong number of arguments"), NULL;
    if (!next_functions) {
        next_functions = PyUnicode_InternFromString("next_functions");
        variable = PyUnicode_InternFromString("variable");
    }
    PyObject *nodes = given[0], *kinds = given[1], *leaf = given[2], *leaves = given[4];
    const int64_t *codes = (const int64_t *)PyLong_AsVoidPtr(given[3]);
    Py_ssize_t size = PyTuple_Size(kinds), roots = PyList_Size(nodes);
    if (PyErr_Occurred()) return NULL;
    size_t places = 4;
    while (places < 2 * (size_t)(size + roots)) places *= 2;
    PyObject **table = calloc(places, sizeof(PyObject *));
    if (!table) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < roots; i++) is_new(table, places, PyList_GetItem(nodes, i));
    int same = 1;
    Py_ssize_t position = 0;
    for (; same > 0 && position < size; position++) {
        if (position == PyList_Size(nodes)) break;
        PyObject *node = PyList_GetItem(nodes, position);
        if ((PyObject *)Py_TYPE(node) != PyTuple_GetItem(kinds, position)) break;
        int64_t inputs = *codes++;
        PyObject *found = PyObject_GetAttr(
            node, (PyObject *)Py_TYPE(node) == leaf ? variable : next_functions);
        if (!found)
            same = -1;
        else if ((PyObject *)Py_TYPE(node) == leaf)
            same = PyList_Append(leaves, found) < 0 ? -1 : 1;
        else if (PyTuple_Size(found) != inputs)
            same = PyErr_Occurred() ? -1 : 0;
        else
            for (int64_t i = 0; same > 0 && i < inputs; i++)
                same = follows(PyTuple_GetItem(found, i), *codes++, nodes, table, places);
        Py_XDECREF(found);
    }
    free(table);
    if (same < 0) return NULL;
    return PyBool_FromLong(same && position == size && PyList_Size(nodes) == size);
}
