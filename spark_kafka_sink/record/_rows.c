/* Rows of Python values to lists of cells, one list for each column: see kernel.py.
 *
 * It takes a row only if its type, its names and the types of its cells are known. Any other row goes back to Python as it
 * is, and the lists do not change. A row is read while the iterator stands at it, and mutable values are copied, so that
 * later changes by its owner have no effect.
 *
 * It holds the GIL. Python code may run only inside of a few calls: the iterator, a lookup in a dict with odd keys, the
 * destruction of an object, and garbage collection when a tuple is made. During these calls this code holds its own
 * reference to each object.
 */
#include "_kernel.h"

enum { BYTES, TYPED, HEADERS, KINDS }; /* as in kernel.py */
enum { MOST_STEPS = 8 };
enum { FAILED = -1, ODD, TAKEN };
enum { NOT_TAKEN, HAS_ROOM, IS_FULL }; /* the results of `add` */

/* What to do with one cell of each row. The plan owns the objects. */
typedef struct {
    long kind;
    Py_ssize_t position;
    PyObject *cells;         /* of HEADERS: how many headers each row has */
    PyObject *allowed;       /* of TYPED: a tuple of types */
    PyObject *keys, *values; /* of HEADERS: of all headers */
} step;

typedef struct {
    PyObject_HEAD
    PyTypeObject *row_type;
    PyObject *names; /* a tuple: of all cells of a row */
    PyObject *plan;
    PyObject *fields_text, *key_text, *value_text;
    Py_ssize_t width;
    Py_ssize_t steps;
    step step[MOST_STEPS];
    long long most_rows, most_bytes, header_bytes;
    long long rows, size;
} taker;

/* ---- one cell ------------------------------------------------------------------------------------------------- */

static int appended(PyObject *list, PyObject *cell) { return PyList_Append(list, cell) < 0 ? FAILED : TAKEN; }

/* A str, bytes or None as it is, a bytearray as bytes. */
static int take_bytes(PyObject *list, PyObject *cell, long long *size)
{
    if (PyUnicode_CheckExact(cell))
        *size += PyUnicode_GetLength(cell);
    else if (PyBytes_CheckExact(cell))
        *size += PyBytes_Size(cell);
    else if (PyByteArray_CheckExact(cell)) {
        PyObject *copy = PyBytes_FromStringAndSize(PyByteArray_AsString(cell), PyByteArray_Size(cell));
        if (copy == NULL)
            return FAILED;
        *size += PyBytes_Size(copy);
        int done = appended(list, copy);
        Py_DECREF(copy);
        return done;
    } else if (cell != Py_None)
        return ODD;
    return appended(list, cell);
}

static int take_typed(const step *of, PyObject *cell)
{
    PyObject *type = (PyObject *)Py_TYPE(cell);
    for (Py_ssize_t index = PyTuple_Size(of->allowed); index-- > 0;)
        if (PyTuple_GetItem(of->allowed, index) == type)
            return appended(of->cells, cell);
    return ODD;
}

/* Returns whether two names are equal texts, or the same object. -1 with an exception. */
static int is_same(PyObject *name, PyObject *other)
{
    if (name == other)
        return 1;
    if (!PyUnicode_CheckExact(name) || !PyUnicode_CheckExact(other))
        return 0;
    int order = PyUnicode_Compare(name, other);
    return order == -1 && PyErr_Occurred() ? -1 : order == 0;
}

/* Returns the names of the cells of a Row, as a list or a tuple: a new reference. NULL without names, or with an exception. */
static PyObject *names_of_row(const taker *self, PyObject *row)
{
    PyObject *names = PyObject_GenericGetAttr(row, self->fields_text);
    if (names == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        return NULL;
    }
    if (PyList_CheckExact(names) || PyTuple_CheckExact(names) || Py_IS_TYPE(names, self->row_type))
        return names; /* Row("key", "value") is a tuple of names too */
    Py_DECREF(names);
    return NULL;
}

static Py_ssize_t count_of(PyObject *list) { return PyList_CheckExact(list) ? PyList_Size(list) : PyTuple_Size(list); }

static PyObject *item_of(PyObject *list, Py_ssize_t index) /* borrowed */
{
    return PyList_CheckExact(list) ? PyList_GetItem(list, index) : PyTuple_GetItem(list, index);
}

/* Gets key and value of a header: new references if it is TAKEN. */
static int pair_of(const taker *self, PyObject *header, PyObject **key, PyObject **value)
{
    if (PyDict_CheckExact(header)) {
        if (PyDict_Size(header) != 2)
            return ODD;
        *key = Py_XNewRef(PyDict_GetItemWithError(header, self->key_text));
        *value = *key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(header, self->value_text));
        if (*value != NULL)
            return TAKEN;
        Py_CLEAR(*key);
        return PyErr_Occurred() ? FAILED : ODD;
    }
    int is_row = Py_IS_TYPE(header, self->row_type);
    if (!(is_row || PyTuple_CheckExact(header) || PyList_CheckExact(header)) || count_of(header) != 2)
        return ODD;
    Py_ssize_t key_at = 0;
    if (is_row) {
        PyObject *names = names_of_row(self, header);
        if (names == NULL)
            return PyErr_Occurred() ? FAILED : ODD;
        int fits = 0;
        if (count_of(names) == 2) {
            PyObject *first = item_of(names, 0), *second = item_of(names, 1);
            fits = is_same(first, self->key_text);
            if (fits > 0)
                fits = is_same(second, self->value_text);
            else if (fits == 0 && (fits = is_same(first, self->value_text)) > 0) {
                fits = is_same(second, self->key_text);
                key_at = 1;
            }
        }
        Py_DECREF(names);
        if (fits <= 0)
            return fits < 0 ? FAILED : ODD;
    }
    *key = Py_NewRef(item_of(header, key_at));
    *value = Py_NewRef(item_of(header, 1 - key_at));
    return TAKEN;
}

static int take_header(const taker *self, const step *of, PyObject *header, long long *size)
{
    PyObject *key = NULL, *value = NULL;
    int done = pair_of(self, header, &key, &value);
    if (done != TAKEN)
        return done;
    done = ODD;
    if (PyUnicode_CheckExact(key))
        done = take_bytes(of->keys, key, size);
    if (done == TAKEN)
        done = take_bytes(of->values, value, size);
    *size += self->header_bytes;
    Py_DECREF(key);
    Py_DECREF(value);
    return done;
}

static int take_headers(const taker *self, const step *of, PyObject *headers, long long *size)
{
    Py_ssize_t count = 0;
    if (headers != Py_None) {
        if (!PyList_CheckExact(headers) && !PyTuple_CheckExact(headers))
            return ODD;
        for (; count < count_of(headers); count++) { /* a list may become shorter on the way */
            PyObject *header = Py_NewRef(item_of(headers, count));
            int done = take_header(self, of, header, size);
            Py_DECREF(header);
            if (done != TAKEN)
                return done;
        }
    }
    PyObject *number = PyLong_FromSsize_t(count);
    if (number == NULL)
        return FAILED;
    int done = appended(of->cells, number);
    Py_DECREF(number);
    return done;
}

/* ---- one row -------------------------------------------------------------------------------------------------- */

/* Returns whether a row has these names. -1 with an exception. The rows of one batch of Spark share the objects of their
 * names. If an object differs, the texts are compared, and the row's names are kept for the next row.
 */
static int has_names(taker *self, PyObject *names)
{
    Py_ssize_t index = 0;
    if (count_of(names) != self->width)
        return 0;
    while (index < self->width && item_of(names, index) == PyTuple_GetItem(self->names, index))
        index++;
    if (index == self->width)
        return 1;
    PyObject *own = PySequence_Tuple(names);
    if (own == NULL)
        return -1;
    int fits = PyTuple_Size(own) == self->width;
    for (index = 0; index < self->width && fits > 0; index++)
        fits = is_same(PyTuple_GetItem(own, index), PyTuple_GetItem(self->names, index));
    if (fits > 0) {
        PyObject *old = self->names;
        self->names = own;
        own = old;
    }
    Py_DECREF(own);
    return fits;
}

/* Returns the values of a dict in order, as a new tuple. NULL for other keys, or with an exception. */
static PyObject *cells_of_dict(const taker *self, PyObject *row)
{
    if (PyDict_Size(row) != self->width)
        return NULL;
    PyObject *cells = PyTuple_New(self->width), *key, *value;
    if (cells == NULL)
        return NULL;
    Py_ssize_t at = 0, index = 0;
    while (PyDict_Next(row, &at, &key, &value)) {
        int same = index < self->width ? is_same(key, PyTuple_GetItem(self->names, index)) : 0;
        if (same <= 0)
            break;
        PyTuple_SetItem(cells, index++, Py_NewRef(value));
    }
    if (index < self->width || PyDict_Size(row) != self->width)
        Py_CLEAR(cells);
    return cells;
}

/* Returns the `width` cells of a row: a new reference. NULL for another kind of row, or with an exception. */
static PyObject *cells_of(taker *self, PyObject *row)
{
    if (PyDict_CheckExact(row))
        return cells_of_dict(self, row);
    if (!Py_IS_TYPE(row, self->row_type) || PyTuple_Size(row) != self->width)
        return NULL;
    PyObject *names = names_of_row(self, row);
    int fits = names == NULL ? 0 : has_names(self, names);
    Py_XDECREF(names);
    return fits > 0 ? Py_NewRef(row) : NULL;
}

/* Cuts a list to its earlier length. */
static int cut(PyObject *list, Py_ssize_t length)
{
    return list == NULL || PyList_Size(list) <= length ? 0 : PyList_SetSlice(list, length, PY_SSIZE_T_MAX, NULL);
}

/* Takes the cells of all steps, or none. */
static int take_cells(const taker *self, PyObject *cells, long long *size)
{
    Py_ssize_t before[MOST_STEPS], headers_before[MOST_STEPS], index;
    for (index = 0; index < self->steps; index++) {
        const step *of = &self->step[index];
        before[index] = PyList_Size(of->cells);
        headers_before[index] = of->keys == NULL ? 0 : PyList_Size(of->keys);
    }
    int done = TAKEN;
    for (index = 0; index < self->steps && done == TAKEN; index++) {
        const step *of = &self->step[index];
        PyObject *cell = PyTuple_GetItem(cells, of->position);
        done = of->kind == BYTES ? take_bytes(of->cells, cell, size)
               : of->kind == TYPED ? take_typed(of, cell)
                                   : take_headers(self, of, cell, size);
    }
    if (done == TAKEN)
        return TAKEN;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    int is_cut = 1;
    for (index = 0; index < self->steps; index++) {
        const step *of = &self->step[index];
        is_cut &= cut(of->cells, before[index]) == 0 && cut(of->keys, headers_before[index]) == 0
                  && cut(of->values, headers_before[index]) == 0;
    }
    if (type != NULL)
        PyErr_Restore(type, error, trace);
    return is_cut ? done : FAILED; /* out of memory: the lists are unusable */
}

/* Takes a whole row, or changes no list. */
static int take_row(taker *self, PyObject *row)
{
    PyObject *cells = cells_of(self, row);
    if (cells == NULL)
        return PyErr_Occurred() ? FAILED : ODD;
    long long size = 0;
    int done = take_cells(self, cells, &size);
    Py_DECREF(cells);
    if (done == TAKEN) {
        self->rows++;
        self->size += size;
    }
    return done;
}

/* ---- Python's side -------------------------------------------------------------------------------------------- */

static int is_full(const taker *self) { return self->rows >= self->most_rows || self->size >= self->most_bytes; }

static PyObject *taker_add(PyObject *self, PyObject *row)
{
    int done = take_row((taker *)self, row);
    if (done == FAILED)
        return NULL;
    return PyLong_FromLong(done == ODD ? NOT_TAKEN : is_full((taker *)self) ? IS_FULL : HAS_ROOM);
}

static PyObject *taker_take(PyObject *object, PyObject *arguments)
{
    taker *self = (taker *)object;
    PyObject *iterator;
    long long rows, bytes;
    if (!PyArg_ParseTuple(arguments, "OLL", &iterator, &rows, &bytes))
        return NULL;
    if (!PyIter_Check(iterator)) {
        PyErr_SetString(PyExc_TypeError, "the rows must be an iterator");
        return NULL;
    }
    const long long size_before = self->size;
    for (; rows > 0 && self->size - size_before < bytes && !is_full(self); rows--) {
        PyObject *row = PyIter_Next(iterator);
        if (row == NULL)
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        int done = take_row(self, row);
        PyObject *rest = done == ODD ? PyTuple_Pack(1, row) : NULL;
        Py_DECREF(row);
        if (done != TAKEN)
            return rest;
    }
    return PyTuple_New(0);
}

static PyObject *taker_rows(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(((taker *)self)->rows);
}

static PyObject *taker_size(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(((taker *)self)->size);
}

static int taker_visit(PyObject *object, visitproc visit, void *arg)
{
    taker *self = (taker *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->row_type);
    Py_VISIT(self->names);
    Py_VISIT(self->plan);
    return 0;
}

/* There is no tp_clear: the methods need names and plan, and the lists of the plan have their own. */
static void taker_dealloc(PyObject *object)
{
    taker *self = (taker *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF((PyObject *)self->row_type);
    Py_XDECREF(self->names);
    Py_XDECREF(self->plan);
    Py_XDECREF(self->fields_text);
    Py_XDECREF(self->key_text);
    Py_XDECREF(self->value_text);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int is_list(PyObject *object) { return object != NULL && PyList_CheckExact(object); }

/* Reads a step of the plan: a tuple (kind, position, list, types or None, list of keys or None, list of values or None). */
static int read_step(PyObject *given, Py_ssize_t width, step *made)
{
    if (!PyTuple_CheckExact(given))
        goto wrong;
    if (!PyArg_ParseTuple(given, "lnOOOO", &made->kind, &made->position, &made->cells, &made->allowed, &made->keys,
                          &made->values))
        return 0;
    if (made->kind != HEADERS)
        made->keys = made->values = NULL;
    if (made->kind < 0 || made->kind >= KINDS || made->position < 0 || made->position >= width || !is_list(made->cells))
        goto wrong;
    if (made->kind == TYPED && !PyTuple_CheckExact(made->allowed))
        goto wrong;
    if (made->kind != HEADERS || (is_list(made->keys) && is_list(made->values)))
        return 1;
wrong:
    PyErr_SetString(PyExc_ValueError, "a step of the plan is out of bounds or of a wrong type");
    return 0;
}

static PyObject *taker_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *row_type, *names, *plan;
    long long most_rows, most_bytes, header_bytes;
    if (keywords != NULL && PyDict_Size(keywords) > 0) {
        PyErr_SetString(PyExc_TypeError, "RowTaker takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "O!OOLLL", &PyType_Type, &row_type, &names, &plan, &most_rows, &most_bytes,
                          &header_bytes))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)row_type, &PyTuple_Type) || !PyTuple_CheckExact(names)
        || !PyTuple_CheckExact(plan) || PyTuple_Size(plan) > MOST_STEPS) {
        PyErr_SetString(PyExc_ValueError, "RowTaker needs a type of tuples, and tuples as names and plan");
        return NULL;
    }
    taker *self = (taker *)PyType_GenericAlloc(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->row_type = (PyTypeObject *)Py_NewRef(row_type);
    self->names = Py_NewRef(names);
    self->plan = Py_NewRef(plan);
    self->fields_text = PyUnicode_InternFromString("__fields__");
    self->key_text = PyUnicode_InternFromString("key");
    self->value_text = PyUnicode_InternFromString("value");
    self->width = PyTuple_Size(names);
    self->steps = PyTuple_Size(plan);
    self->most_rows = most_rows;
    self->most_bytes = most_bytes;
    self->header_bytes = header_bytes;
    int is_whole = self->fields_text != NULL && self->key_text != NULL && self->value_text != NULL;
    for (Py_ssize_t index = 0; index < self->steps && is_whole; index++)
        is_whole = read_step(PyTuple_GetItem(plan, index), self->width, &self->step[index]);
    if (!is_whole)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMethodDef taker_methods[] = {
    {"take", taker_take, METH_VARARGS, "Take rows of an iterator. See kernel.py."},
    {"add", taker_add, METH_O, "Take one row. See kernel.py."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef taker_numbers[] = {
    {"rows", taker_rows, NULL, "The number of rows taken.", NULL},
    {"size", taker_size, NULL, "About the bytes of the rows taken.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot taker_slots[] = {
    {Py_tp_doc, "Takes rows of one layout into lists. See kernel.py."},
    {Py_tp_new, taker_new},
    {Py_tp_dealloc, taker_dealloc},
    {Py_tp_traverse, taker_visit},
    {Py_tp_methods, taker_methods},
    {Py_tp_getset, taker_numbers},
    {0, NULL},
};

static PyType_Spec taker_spec = {"spark_kafka_sink.record._kernel.RowTaker", sizeof(taker), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, taker_slots};

int add_row_taker(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &taker_spec, NULL);
    if (type == NULL)
        return -1;
    int added = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return added;
}
