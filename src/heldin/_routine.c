/* A step that is like the one before it: the same graph over the same parameters, all of them of
   linear layers.

   What `_pass.py` finds out anew for each backward pass is compared here with what it found for the
   last one. If all of it is the same, the sums are formed without a line of Python in between: with
   a model of a few thousand weights those lines would take longer than the step itself. If anything
   differs, `begin` says so before anything is done. See `_routine.py`. */

/* Tensors as numbers in memory: DLPack's table of C functions, which newer PyTorch has. */
typedef struct {
    char *data;
    int32_t device, number, dimensions;
    uint8_t kind, bits;
    uint16_t lanes;
    I *shape, *strides;
    uint64_t offset;
} View;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *take, *give;
    int (*view)(void *tensor, View *view);
} Exchange;

#define CPU 1
#define REALS 2

static Exchange *exchange;
static PyObject *plain, *parameter; /* the types of tensors that are nothing else */
static PyObject *current_task, *is_batched;
static PyObject *next_functions, *variable, *unpack_hook, *data, *is_neg, *register_prehook, *drop;

/* Whether the numbers of a tensor lie in the memory of the CPU as the strides say, in a matrix. */
static int is_matrix(PyObject *tensor, View *view, int bits, I rows, I columns)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor), *negative;
    if (type != plain && type != parameter) return 0;
    negative = PyObject_CallMethodObjArgs(tensor, is_neg, NULL);
    Py_XDECREF(negative);
    if (negative != Py_False || exchange->view(tensor, view)) {
        PyErr_Clear();
        return 0;
    }
    return view->device == CPU && view->kind == REALS && view->bits == bits && view->lanes == 1 &&
           view->dimensions == 2 && view->shape[0] == rows && view->shape[1] == columns &&
           view->data && view->strides && !view->offset;
}

#define NODES 64 /* at most */
struct Routine;

/* Listens at a node where a matrix, and perhaps a vector, meets rows of data, one per sample. */
typedef struct {
    PyObject_HEAD
    struct Routine *routine; /* which owns it; NULL when that is gone */
    I position, m, in, out; /* of the node; samples; width of the rows before and after */
    int bits, flip; /* of a number; whether the matrix is (out, in) */
    PyObject *first, *second; /* names of the matrix and of the vector */
    PyObject *raw, *scales; /* names of what the node has saved: the rows; factors that must be 1 */
    I matrix[3], vector[3]; /* addresses for sums, squares and ratios; or zeros */
    I block[9]; /* first index, step and number: rows and columns of the matrix; of the vector */
    PyObject *node, *rows, *handle; /* while a pass is under way */
    int full;
} Reader;

typedef struct Routine {
    PyObject_HEAD
    PyObject *kinds, *edges, *leaves, *readers;
    I sizes[NODES][3]; /* of the leaves: how many dimensions, and each */
    double part, extreme, factor; /* see `ratios`, and `usual` of `_moments.py` */
    PyObject *names; /* of the parameters */
    double **ratios;
    I *lengths;
    double *weights;
    I task; /* the engine's number for the pass; -1: not known yet */
    int running, failed;
} Routine;

/* --- during the pass --- */

#define FORM(real, outer, columns) \
    static int form_##real(const Reader *self, const View *given, const View *saved, double part) \
    { \
        const View *left = self->flip ? given : saved, *right = self->flip ? saved : given; \
        const I *u = left->strides, *v = right->strides, *w = given->strides; \
        const I *at = self->matrix, *to = self->vector, *n = self->block; \
        int done = outer((real *)left->data + n[0] * u[1], u[0], 0, n[1] * u[1], \
                         (real *)right->data + n[3] * v[1], v[0], 0, n[4] * v[1], self->m, 1, \
                         n[2], n[5], (real *)at[0], (real *)at[1], part, (double *)at[2]); \
        if (done && to[0]) \
            done = columns((real *)given->data + n[6] * w[1], w[0], 0, n[7] * w[1], self->m, 1, \
                           n[8], 0, NULL, 0, 0, 0, NULL, NULL, 0, 0, (real *)to[0], \
                           (real *)to[1], part, (double *)to[2]); \
        return done; \
    }
FORM(float, outer_float, columns_float)
FORM(double, outer_double, columns_double)

static void forget(Routine *self)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(self->readers); i++)
        ((Reader *)PyTuple_GetItem(self->readers, i))->full = 0;
    self->failed = 0;
}

/* Have the rows that the node has saved, unless they were packed (by a checkpoint, say). */
static int fetch(Reader *self)
{
    PyObject *raw = self->node ? PyObject_GetAttr(self->node, self->raw) : NULL;
    PyObject *hook = raw ? PyObject_GetAttr(raw, unpack_hook) : NULL;
    self->rows = hook == Py_None ? PyObject_GetAttr(raw, data) : NULL;
    Py_XDECREF(hook);
    Py_XDECREF(raw);
    if (!self->rows) PyErr_Clear();
    return self->rows != NULL;
}

/* The gradient is about to go through the node; as `Pass._ours` and `fill`. */
static PyObject *reader_call(PyObject *object, PyObject *args, PyObject *names)
{
    Reader *self = (Reader *)object;
    Routine *routine = self->routine;
    PyObject *grads, *grad, *answer;
    View given, saved;
    int fine;
    I task;
    (void)names;
    if (!routine || !routine->running) Py_RETURN_NONE;
    if (!(answer = PyObject_CallNoArgs(current_task))) return NULL;
    task = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    if (routine->task >= 0 && task > routine->task) Py_RETURN_NONE; /* of the user's hooks */
    if (!(grads = PyTuple_GetItem(args, 0)) || !(grad = PyTuple_GetItem(grads, 0))) return NULL;
    fine = is_matrix(grad, &given, self->bits, self->m, self->out);
    if (!fine && grad != Py_None) {
        if (!(answer = PyObject_CallFunctionObjArgs(is_batched, grad, NULL))) return NULL;
        Py_DECREF(answer);
        if (answer == Py_True) Py_RETURN_NONE; /* of several passes at once */
    }
    if (task != routine->task) { /* what was seen so far belonged to another pass */
        forget(routine);
        routine->task = task;
    }
    if (grad == Py_None) Py_RETURN_NONE; /* nothing comes through here */
    /* looked up again, since hooks may have put other data there; let go, since it may be large */
    fine = fine && (self->rows || fetch(self));
    fine = fine && is_matrix(self->rows, &saved, self->bits, self->m, self->in);
    if (fine && self->bits == 32) fine = form_float(self, &given, &saved, routine->part);
    else if (fine) fine = form_double(self, &given, &saved, routine->part);
    Py_CLEAR(self->rows);
    self->full = fine;
    if (!fine) routine->failed = 1;
    Py_RETURN_NONE;
}

/* --- before the pass --- */

/* Whether an attribute is there and equal to one. */
static int is_one(PyObject *node, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(node, name);
    double number = value ? PyFloat_AsDouble(value) : 0;
    Py_XDECREF(value);
    return number == 1;
}

/* Look up what the node has saved. */
static int aim(Reader *self, PyObject *node)
{
    View view;
    Py_INCREF(node);
    self->node = node;
    self->full = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(self->scales); i++)
        if (!is_one(node, PyTuple_GetItem(self->scales, i))) return 0;
    return fetch(self) && is_matrix(self->rows, &view, self->bits, self->m, self->in);
}

static int is_known(PyObject **nodes, Py_ssize_t count, PyObject *node)
{
    while (count--)
        if (nodes[count] == node) return 1;
    return 0;
}

/* Whether a leaf is the parameter that it was, in the shape that it had. */
static int is_leaf(Routine *self, PyObject *node, Py_ssize_t position)
{
    PyObject *found = PyObject_GetAttr(node, variable);
    const I *size = self->sizes[position];
    View view;
    int same = found && found == PyTuple_GetItem(self->leaves, position);
    same = same && !exchange->view(found, &view) && view.dimensions == size[0];
    for (int i = 0; same && i < size[0]; i++) same = view.shape[i] == size[1 + i];
    Py_XDECREF(found);
    return same;
}

#define OUTPUTS 20 /* bits for the number of an output, see `_graph.py` */

/* Walk the graph as `walk` of `_graph.py` does, as long as it is the one that was seen before. Gives
   the number of nodes that were taken, below zero if it is another one. */
static Py_ssize_t follow(Routine *self, PyObject *root, PyObject **nodes)
{
    const I *edge = (const I *)PyBytes_AsString(self->edges);
    Py_ssize_t known = 1, count = PyTuple_Size(self->kinds);
    Py_INCREF(root);
    nodes[0] = root;
    for (Py_ssize_t i = 0; i < known; i++) {
        I inputs = *edge++;
        if ((PyObject *)Py_TYPE(nodes[i]) != PyTuple_GetItem(self->kinds, i)) return -known;
        if (PyTuple_GetItem(self->leaves, i) != Py_None) {
            if (!is_leaf(self, nodes[i], i)) return -known;
            continue;
        }
        PyObject *next = PyObject_GetAttr(nodes[i], next_functions);
        int same = next && PyTuple_Size(next) == inputs;
        for (I j = 0; same && j < inputs; j++) {
            PyObject *pair = PyTuple_GetItem(next, j), *child = PyTuple_GetItem(pair, 0);
            I code = *edge++, at = code >> OUTPUTS;
            if (code < 0 || child == Py_None) {
                same = code < 0 && child == Py_None;
                continue;
            }
            same = PyLong_AsLongLong(PyTuple_GetItem(pair, 1)) == (code & ((1 << OUTPUTS) - 1));
            if (same && at == known && known < count && !is_known(nodes, known, child)) {
                Py_INCREF(child);
                nodes[known++] = child;
            } else
                same = same && at < known && nodes[at] == child;
        }
        Py_XDECREF(next);
        if (!same) return -known;
    }
    return known == count ? known : -known;
}

/* --- the routine as Python sees it --- */

/* Puts a new object into a dictionary. */
static int put(PyObject *into, PyObject *name, PyObject *value)
{
    int done = value && !PyDict_SetItem(into, name, value);
    Py_XDECREF(value);
    return done;
}

/* What was found, by name: what `usual` of `_moments.py` gives for the ratios, with the number of
   coordinates and the weight of each; criterion; live coordinates. Parameters of which `usual`
   gives nothing, or without live coordinates, are left out. Then the names of those that no gradient
   came to. */
static PyObject *found_by(Routine *self, PyObject *missing)
{
    PyObject *ratios = PyDict_New(), *criteria = PyDict_New(), *alive = PyDict_New();
    int fine = ratios && criteria && alive;
    for (Py_ssize_t i = 0; fine && i < PyTuple_Size(self->names); i++) {
        PyObject *name = PyTuple_GetItem(self->names, i);
        double sum = self->ratios[i][0] * self->factor, live = self->ratios[i][1];
        if (!(self->ratios[i][0] < self->extreme) || live < 1) continue;
        double by = self->weights[i];
        fine = put(ratios, name, Py_BuildValue("(ddO)Ld", sum, live, Py_True, self->lengths[i], by))
            && put(criteria, name, PyFloat_FromDouble(1 - sum * by / (live * by)))
            && put(alive, name, PyLong_FromDouble(live));
    }
    if (fine) return Py_BuildValue("NNNO", ratios, criteria, alive, missing);
    Py_XDECREF(ratios);
    Py_XDECREF(criteria);
    Py_XDECREF(alive);
    return NULL;
}

/* end(kept): let go of the graph, whose nodes may be `kept` for another pass (otherwise nobody will
   call again). Gives what was found; None if something went wrong. */
static PyObject *routine_end(PyObject *object, PyObject *kept_alive)
{
    Routine *self = (Routine *)object;
    PyObject *missing = PyList_New(0), *found;
    for (Py_ssize_t i = 0; i < PyTuple_Size(self->readers); i++) {
        Reader *reader = (Reader *)PyTuple_GetItem(self->readers, i);
        PyObject *handle = reader->handle;
        for (int j = 0; missing && !reader->full && j < 2; j++) {
            PyObject *name = j ? reader->second : reader->first;
            I at = j ? reader->vector[2] : reader->matrix[2];
            if (!at) continue;
            *(double *)at = NAN;
            if (PyList_Append(missing, name)) Py_CLEAR(missing);
        }
        reader->handle = NULL;
        Py_CLEAR(reader->rows);
        Py_CLEAR(reader->node);
        if (handle && kept_alive != Py_False) {
            PyObject *done = PyObject_CallMethodObjArgs(handle, drop, NULL);
            if (!done) PyErr_Clear();
            Py_XDECREF(done);
        }
        Py_XDECREF(handle);
    }
    self->running = 0;
    found = missing && !self->failed ? found_by(self, missing) : NULL;
    Py_XDECREF(missing);
    if (found || PyErr_Occurred()) return found;
    Py_RETURN_NONE;
}

/* place(blocks, sizes): nine numbers for each reader, see there; for each parameter the number of
   coordinates, and how many each one stands for. */
static PyObject *routine_place(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Routine *self = (Routine *)object;
    Py_ssize_t readers = PyTuple_Size(self->readers), names = PyTuple_Size(self->names);
    if (count != 2 || PyTuple_Size(given[0]) != readers || PyTuple_Size(given[1]) != names) {
        PyErr_SetString(PyExc_ValueError, "place takes a tuple for each reader and each parameter");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < readers; i++) {
        I *n = ((Reader *)PyTuple_GetItem(self->readers, i))->block;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given[0], i), "LLLLLLLLL", n, n + 1, n + 2, n + 3,
                              n + 4, n + 5, n + 6, n + 7, n + 8))
            return NULL;
    }
    for (Py_ssize_t i = 0; i < names; i++)
        if (!PyArg_ParseTuple(PyTuple_GetItem(given[1], i), "Ld", self->lengths + i,
                              self->weights + i))
            return NULL;
    Py_RETURN_NONE;
}

/* begin(root, end): listen to the pass that starts at the node `root`, if it is as it was, and goes
   through the node `end`. */
static PyObject *routine_begin(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Routine *self = (Routine *)object;
    PyObject *nodes[NODES];
    Py_ssize_t found, fine;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "begin takes two nodes");
        return NULL;
    }
    if (self->running) Py_RETURN_FALSE; /* also for another thread, while hooks are registered */
    self->running = 1;
    found = follow(self, given[0], nodes);
    fine = found > 0 && is_known(nodes, found, given[1]);
    self->task = -1;
    self->failed = 0;
    for (Py_ssize_t i = 0; fine && i < PyTuple_Size(self->readers); i++) {
        Reader *reader = (Reader *)PyTuple_GetItem(self->readers, i);
        fine = aim(reader, nodes[reader->position]);
    }
    for (Py_ssize_t i = 0; fine && i < PyTuple_Size(self->readers); i++) {
        Reader *reader = (Reader *)PyTuple_GetItem(self->readers, i);
        PyObject *node = nodes[reader->position];
        reader->handle = PyObject_CallMethodObjArgs(node, register_prehook, reader, NULL);
        fine = reader->handle != NULL;
    }
    for (Py_ssize_t i = 0; i < (found < 0 ? -found : found); i++) Py_DECREF(nodes[i]);
    if (fine) Py_RETURN_TRUE;
    PyErr_Clear(); /* whatever it is: the usual way will say it */
    Py_XDECREF(routine_end(object, Py_True));
    Py_RETURN_FALSE;
}

static int set(PyObject **place, PyObject *value)
{
    Py_INCREF(value);
    *place = value;
    return 1;
}

static PyObject *reader_type, *routine_type;

static PyObject *new_reader(Routine *routine, PyObject *given)
{
    Reader *self = (Reader *)PyType_GenericAlloc((PyTypeObject *)reader_type, 0);
    PyObject *first, *second, *raw, *scales;
    I *u, *v;
    if (!self) return NULL;
    u = self->matrix, v = self->vector;
    if (!PyArg_ParseTuple(given, "LLLLiiO!O!O!O!(LLL)(LLL)", &self->position, &self->m, &self->in,
                          &self->out, &self->bits, &self->flip, &PyUnicode_Type, &first,
                          &PyUnicode_Type, &second, &PyUnicode_Type, &raw,
                          &PyTuple_Type, &scales, u, u + 1, u + 2, v, v + 1, v + 2)) {
        Py_DECREF(self);
        return NULL;
    }
    set(&self->first, first);
    set(&self->second, second);
    set(&self->raw, raw);
    set(&self->scales, scales);
    self->routine = routine;
    return (PyObject *)self;
}

/* Routine(kinds, edges, leaves, shapes, readers, names, places, (part, extreme, factor)): types of
   the nodes, flat edges as bytes, leaves or None and their shapes; what `new_reader` takes; names
   of the parameters and, for each, the address of its ratios. Then `place` has to be called. */
static PyObject *routine_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    Routine *self = (Routine *)PyType_GenericAlloc(type, 0);
    PyObject *kinds, *edges, *leaves, *shapes, *given, *labels, *places;
    Py_ssize_t count, number;
    (void)names;
    if (!self) return NULL;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!(ddd)", &PyTuple_Type, &kinds, &PyBytes_Type,
                          &edges, &PyTuple_Type, &leaves, &PyTuple_Type, &shapes, &PyTuple_Type,
                          &given, &PyTuple_Type, &labels, &PyTuple_Type, &places, &self->part,
                          &self->extreme, &self->factor))
        goto wrong;
    count = PyTuple_Size(kinds);
    if (count > NODES || PyTuple_Size(leaves) != count || PyTuple_Size(shapes) != count) {
        PyErr_SetString(PyExc_ValueError, "too many nodes, or not as many leaves and shapes");
        goto wrong;
    }
    set(&self->kinds, kinds), set(&self->edges, edges);
    set(&self->leaves, leaves);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *shape = PyTuple_GetItem(shapes, i);
        self->sizes[i][0] = PyTuple_Size(shape);
        for (Py_ssize_t j = 0; j < self->sizes[i][0] && j < 2; j++)
            self->sizes[i][1 + j] = PyLong_AsLongLong(PyTuple_GetItem(shape, j));
        if (PyErr_Occurred()) goto wrong;
        if (self->sizes[i][0] > 2) {
            PyErr_SetString(PyExc_ValueError, "a leaf with more than two dimensions");
            goto wrong;
        }
    }
    number = PyTuple_Size(labels);
    set(&self->names, labels);
    self->ratios = calloc(number + 1, sizeof(double *));
    self->lengths = calloc(number + 1, sizeof(I));
    self->weights = calloc(number + 1, sizeof(double));
    if (!self->ratios || !self->lengths || !self->weights) {
        PyErr_NoMemory();
        goto wrong;
    }
    if (PyTuple_Size(places) != number) {
        PyErr_SetString(PyExc_ValueError, "not as many places as names");
        goto wrong;
    }
    for (Py_ssize_t i = 0; i < number; i++) {
        self->ratios[i] = (double *)PyLong_AsLongLong(PyTuple_GetItem(places, i));
        if (PyErr_Occurred()) goto wrong;
    }
    if (!(self->readers = PyTuple_New(PyTuple_Size(given)))) goto wrong;
    for (Py_ssize_t i = 0; i < PyTuple_Size(given); i++) {
        PyObject *reader = new_reader(self, PyTuple_GetItem(given, i));
        if (!reader) goto wrong;
        PyTuple_SetItem(self->readers, i, reader);
        if (((Reader *)reader)->position < 0 || ((Reader *)reader)->position >= count) {
            PyErr_SetString(PyExc_ValueError, "a reader at no node");
            goto wrong;
        }
    }
    return (PyObject *)self;
wrong:
    Py_DECREF(self);
    return NULL;
}

static int routine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Routine *self = (Routine *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->kinds);
    Py_VISIT(self->leaves);
    Py_VISIT(self->readers);
    return 0;
}

static int routine_clear(PyObject *object)
{
    Routine *self = (Routine *)object;
    for (Py_ssize_t i = 0; self->readers && i < PyTuple_Size(self->readers); i++) {
        Reader *reader = (Reader *)PyTuple_GetItem(self->readers, i);
        if (reader) reader->routine = NULL;
    }
    Py_CLEAR(self->kinds);
    Py_CLEAR(self->edges);
    Py_CLEAR(self->leaves);
    Py_CLEAR(self->names);
    Py_CLEAR(self->readers);
    return 0;
}

static void routine_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    routine_clear(object);
    free(((Routine *)object)->ratios);
    free(((Routine *)object)->lengths);
    free(((Routine *)object)->weights);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static void reader_dealloc(PyObject *object)
{
    Reader *self = (Reader *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->first);
    Py_XDECREF(self->second);
    Py_XDECREF(self->raw);
    Py_XDECREF(self->scales);
    Py_XDECREF(self->node);
    Py_XDECREF(self->rows);
    Py_XDECREF(self->handle);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot reader_slots[] = {
    {Py_tp_call, reader_call}, {Py_tp_dealloc, reader_dealloc}, {0, NULL}};
static PyType_Spec reader_spec = {
    "heldin._compiled.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT, reader_slots};

static PyMethodDef routine_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))routine_begin, METH_FASTCALL, NULL},
    {"end", routine_end, METH_O, NULL},
    {"place", (PyCFunction)(void (*)(void))routine_place, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}};
static PyType_Slot routine_slots[] = {
    {Py_tp_new, routine_new},           {Py_tp_dealloc, routine_dealloc},
    {Py_tp_traverse, routine_traverse}, {Py_tp_clear, routine_clear},
    {Py_tp_methods, routine_methods},   {0, NULL}};
static PyType_Spec routine_spec = {"heldin._compiled.Routine", sizeof(Routine), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, routine_slots};

/* routine(table, plain, parameter, current_task, is_batched): the type, which needs to know these;
   None if the table is of a version that is not understood. */
static PyObject *py_routine(PyObject *self, PyObject *args)
{
    PyObject *table, *given[4];
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOO", &table, given, given + 1, given + 2, given + 3))
        return NULL;
    if (!(exchange = PyCapsule_GetPointer(table, "dlpack_exchange_api"))) return NULL;
    if (exchange->major != 1 || !exchange->view) Py_RETURN_NONE;
    set(&plain, given[0]), set(&parameter, given[1]);
    set(&current_task, given[2]), set(&is_batched, given[3]);
    next_functions = PyUnicode_InternFromString("next_functions");
    variable = PyUnicode_InternFromString("variable");
    unpack_hook = PyUnicode_InternFromString("unpack_hook");
    data = PyUnicode_InternFromString("data");
    is_neg = PyUnicode_InternFromString("is_neg");
    register_prehook = PyUnicode_InternFromString("register_prehook");
    drop = PyUnicode_InternFromString("remove");
    reader_type = PyType_FromSpec(&reader_spec);
    routine_type = PyType_FromSpec(&routine_spec);
    if (!reader_type || !drop) return NULL;
    return routine_type;
}
